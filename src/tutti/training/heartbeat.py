"""The heartbeat of a rank, for watching the run from outside: see `tutti.records.heartbeat`."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Final

from typing_extensions import override

from tutti.records.heartbeat import EVERY_S, FAILED, FINISHED, TRAINING, Heartbeat
from tutti.records.run import EpochRecord
from tutti.records.run_folder import RunFolder
from tutti.records.texts import RunLength, printable
from tutti.training.progress import Moment, Progress

SMOOTH_S: Final = 10.0
"""Seconds over which rates are averaged, about: over one second ranks differ by chance."""

FIRST_S: Final = 0.1
"""Seconds from the beginning to the first heartbeat: writing it takes as long as a step of a small model."""

_COMMUNICATORS: Final = "tutti.comm."


class HeartbeatThread(Progress):
    """The heartbeat of a rank: written about once a second inside the block, and once more at its end.

    A thread writes it, so that a rank is heard of while it waits, validates or makes a long step: a silent
    rank was stopped, or has died.
    """

    every_s = EVERY_S

    def __init__(self, folder: RunFolder, rank: int) -> None:
        self._folder = folder
        self._beat = Heartbeat(rank, socket.gethostname(), os.getpid(), time.time())
        self._before = (0, 0, 0.0, 0)
        self._trainer = threading.get_ident()
        self._over, self._writable = threading.Event(), True
        self._thread = threading.Thread(target=self._write_often, name="tutti-heartbeat", daemon=True)

    def __enter__(self) -> HeartbeatThread:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()
        if error is None:
            self._note(state=FINISHED)
        else:
            name, text = type(error).__name__, printable(str(error).partition("\n")[0])
            self._note(state=FAILED, error=f"{name}: {text}" if text else name)
        if self._writable:
            self._write()

    @override
    def begin(self, span: RunLength, step: int = 0) -> None:
        length = {"updates": span.last, "per_epoch": span.per_epoch, "counted": span.counted}
        self._note(state=TRAINING, epoch=span.epoch_behind(step), step=step, began=time.time(), **length)
        # A resumed run does not know how many samples of its epoch are over.
        self._before = (0 if step else 1, step, time.monotonic(), 0)

    @override
    def moment(self, moment: Moment) -> None:
        epoch, step, at, samples = self._before
        self._before = (moment.epoch, moment.step, time.monotonic(), moment.train.samples)
        rates = dict[str, float]()
        if moment.epoch == epoch:
            made = moment.step - step, moment.train.samples - samples
            rates = self._rates(*made, passed=self._before[2] - at)
        self._note(state=TRAINING, epoch=moment.epoch, step=moment.step, **rates)

    @override
    def doing(self, what: str, step: int | None = None) -> None:
        self._note(state=what, step=self._beat.step if step is None else step)

    @override
    def epoch(self, record: EpochRecord) -> None:
        # The record may come while later epochs are trained, and have fewer ranks than there are now.
        if record.epoch < self._beat.epoch or self._beat.rank >= len(record.ranks):
            return
        mine = record.ranks[self._beat.rank]
        seconds = record.seconds["total"] - record.seconds["validation"]
        self._before = (record.epoch + 1, record.step, time.monotonic(), 0)
        rates = self._rates(mine.updates, mine.samples, passed=seconds)
        self._note(state=TRAINING, epoch=record.epoch, step=record.step, **rates)

    def _rates(self, steps: int, samples: int, passed: float) -> dict[str, float]:
        """Average the rates with those of the last `passed` seconds."""
        if passed <= 0:
            return {}
        weight = min(1.0, passed / SMOOTH_S) if self._beat.steps_per_s else 1.0
        new = {"steps_per_s": steps / passed, "samples_per_s": samples / passed}
        return {name: (1 - weight) * getattr(self._beat, name) + weight * rate for name, rate in new.items()}

    def _note(self, **values: Any) -> None:
        self._beat = replace(self._beat, moved=time.time(), **values)

    def _write_often(self) -> None:
        # A run that is over sooner has its last heartbeat alone.
        if self._over.wait(FIRST_S):
            return
        while self._write() and not self._over.wait(EVERY_S):
            pass

    def _write(self) -> bool:
        """Write the file; return whether to write it again."""
        try:
            beat = replace(self._beat, time=time.time(), waits=_operation(self._trainer))
            self._folder.write_heartbeat(beat)
        except Exception as error:  # training goes on in any case
            self._writable = False
            why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            what = f"rank {self._beat.rank} cannot write its heartbeat into {self._folder.path}: {why}"
            with suppress(OSError, ValueError):  # stderr is closed
                print(f"tutti: warning: {what}; it trains on", file=sys.stderr, flush=True)
        return self._writable


def _operation(thread: int) -> str:
    """Return the communicator operation that a thread is in, and the line that called it."""
    frame, entered = sys._current_frames().get(thread), ""
    while frame is not None:
        module = str(frame.f_globals.get("__name__"))
        if module.startswith(_COMMUNICATORS):
            entered = frame.f_code.co_name
        elif entered:
            return f"{entered} ({module}:{frame.f_lineno})"
        frame = frame.f_back
    return entered
