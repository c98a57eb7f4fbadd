"""The signs of life of a rank, for those who watch the run from outside: see `tutti.records.heartbeat`."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from tutti.records.heartbeat import EVERY_S, FAILED, FINISHED, TRAINING, Heartbeat, write_heartbeat
from tutti.records.run import EpochRecord
from tutti.records.untrusted import printable
from tutti.training.progress import Moment, RunLength

SMOOTH_S: Final = 10.0
"""How many seconds of training a rank's rates are of, about: in one second ranks differ by chance."""

_COMMUNICATORS: Final = "tutti.comm."


class Heart:
    """Leaves a sign of life about once a second while the block goes on, and a last one when it is left.

    A thread leaves it, so that a rank which waits, validates or makes a long step does so too: who is silent
    has been stopped, or has died. The training loop only says how far it has come; it is a `Progress`.

    Args:
        folder: the run's; None: on a host that does not see it, where no sign is left.
        rank: this rank.
    """

    every_s = EVERY_S

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._folder = folder
        self._beat = Heartbeat(rank, socket.gethostname(), os.getpid(), time.time())
        self._before = (0, 0, 0.0, 0)
        self._trains = threading.get_ident()
        self._over, self._able = threading.Event(), True
        self._thread = threading.Thread(target=self._go_on, name="tutti-heart", daemon=True)

    def __enter__(self) -> Heart:
        if self._folder is not None:
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._folder is None:
            return
        self._over.set()
        self._thread.join()
        if error is None:
            self._note(state=FINISHED)
        else:
            text = printable(str(error).partition("\n")[0])
            self._note(
                state=FAILED, error=f"{type(error).__name__}: {text}" if text else type(error).__name__
            )
        if self._able:
            self._leave_sign()

    def begin(self, span: RunLength) -> None:
        """Training begins."""
        self._note(state=TRAINING, epoch=1, began=time.time(), updates=span.updates, per_epoch=span.per_epoch)
        self._before = (1, 0, time.monotonic(), 0)

    def moment(self, moment: Moment) -> None:
        """An epoch goes on."""
        epoch, step, at, samples = self._before
        self._before = (moment.epoch, moment.step, time.monotonic(), moment.train.samples)
        rates = dict[str, float]()
        if moment.epoch == epoch:
            made = moment.step - step, moment.train.samples - samples
            rates = self._rates(*made, passed=self._before[2] - at)
        self._note(state=TRAINING, epoch=moment.epoch, step=moment.step, **rates)

    def doing(self, what: str) -> None:
        """The rank does something else than to train: one of the states of `tutti.records.heartbeat`."""
        self._note(state=what)

    def epoch(self, record: EpochRecord) -> None:
        """An epoch has ended."""
        # The record of an epoch may come when training has long gone on.
        if record.epoch < self._beat.epoch:
            return
        mine = record.ranks[self._beat.rank]
        seconds = record.seconds["total"] - record.seconds["validation"]
        self._before = (record.epoch + 1, record.step, time.monotonic(), 0)
        rates = self._rates(mine.updates, mine.samples, passed=seconds)
        self._note(state=TRAINING, epoch=record.epoch, step=record.step, **rates)

    def end(self) -> None:
        """Training has ended, well or not; the rank lives on."""

    def _rates(self, steps: int, samples: int, passed: float) -> dict[str, float]:
        """The rates after so many seconds more: means in which what is `SMOOTH_S` old has lost its weight."""
        if passed <= 0:
            return {}
        weight = min(1.0, passed / SMOOTH_S) if self._beat.steps_per_s else 1.0
        new = {"steps_per_s": steps / passed, "samples_per_s": samples / passed}
        return {name: (1 - weight) * getattr(self._beat, name) + weight * rate for name, rate in new.items()}

    def _note(self, **found: Any) -> None:
        self._beat = replace(self._beat, moved=time.time(), **found)

    def _go_on(self) -> None:
        while self._leave_sign() and not self._over.wait(EVERY_S):
            pass

    def _leave_sign(self) -> bool:
        """Write the file; whether that can be tried again."""
        assert self._folder is not None
        try:
            beat = replace(self._beat, time=time.time(), waits=_communicates(self._trains))
            write_heartbeat(self._folder, beat)
        except FileNotFoundError:
            # Rank 0 takes the folder back when a run fails early, and the failure speaks for itself.
            self._able = False
        except Exception as error:  # whatever it is, the rank is there to train
            self._able = False
            why = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            what = f"rank {self._beat.rank} cannot leave signs of life in {self._folder}: {why}"
            with suppress(OSError, ValueError):  # who read it has gone, or the program has closed it
                print(f"tutti: warning: {what}; it trains on", file=sys.stderr, flush=True)
        return self._able


def _communicates(thread: int) -> bool:
    """Whether a thread of this process is in an operation of a communicator."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if str(frame.f_globals.get("__name__")).startswith(_COMMUNICATORS):
            return True
        frame = frame.f_back
    return False
