"""Detection of ranks that hang: they make no step, print their stacks, and are killed.

    rank 0   step │ step │ waits for rank 1 ...............................
    rank 1   step │ step │ deadlock, or stopped ............... stacks ✝
    supervisor                         looks once a second    ─┘

A rank that trains publishes its number of steps, and every rank whether it waits for another one: see
`tutti.comm.shm.layout`. A rank that waits is not to blame, unless all do. A rank that a signal has stopped is
lost. Outside training steps a rank may take any time: one that gives no sign of life is named in a warning.
Ranks on other hosts send their status (`tutti.launch.rank_connections`). Needs no torch.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tutti.comm.shm.arena import FIRST, Arena
from tutti.comm.shm.layout import FIRST_STEP, MOST_PHASES, PID, STEPS, WAITS, ControlLayout
from tutti.records.heartbeat import SAVING, STARTING, TESTING, VALIDATING, WAITING

LOOK_S: Final = 1.0
"""Time between two looks."""

LONG_STEPS: Final = 10.0
"""The multiple of its longest step so far that a rank may take for one."""

ALLOWANCE: Final = 10.0
"""Factor on the time-out for the first step, in which code may be compiled."""

PAUSE_S: Final = 5.0
"""A longer time between two looks: this process was stopped itself, as by Ctrl-Z, and the ranks with it.

A rank on another host whose last status is this old is stopped."""

PRINTING_S: Final = 0.5
"""Time of a rank to print its stacks."""

STACKS: Final = signal.SIGUSR2
"""The signal on which a rank that trains prints the stacks of its threads."""

STOPPED_WHY: Final = "it was stopped by a signal (SIGSTOP), and not continued"

EPOCH_OVER: Final = "epoch over"

PHASES: Final = {
    STARTING: "before its first step, where data are read and the model is built",
    WAITING: "at the end of an epoch",
    VALIDATING: "in the validation",
    SAVING: "while it saves",
    EPOCH_OVER: "behind an epoch, where callbacks and loggers run",
    TESTING: "in the test",
}
"""What a rank does that does not train; it publishes the number of the entry."""

SILENT_WHY: Final = (
    "it was silent though its host answers: it was stopped by a signal (SIGSTOP), or something holds the "
    "interpreter's lock"
)


def print_stacks_when_asked() -> None:
    """Print the stacks of this process's threads on the signal `STACKS`, even while it runs no Python."""
    faulthandler.register(STACKS, all_threads=True)


def print_stacks() -> None:
    """Print the stacks of the threads of this process, which trains."""
    os.kill(os.getpid(), STACKS)


@dataclass(frozen=True)
class RankStatus:
    """The status of a rank."""

    steps: int  # the word STEPS of `tutti.comm.shm.layout`
    waits: bool  # for other ranks, for more than a moment
    at: float = 0.0  # the time of this status, by the monotonic clock
    stopped: bool = False  # by a signal


@dataclass
class _History:
    """The past of a rank; times are by the monotonic clock."""

    steps: int = 0  # the last step word that was read
    since: float = 0.0  # its last change
    silent_since: float | None = None  # that, or its last wait for others; None: a warning has named the rank
    seen: float = 0.0  # the last look
    longest_s: float | None = None  # the longest step so far
    stopped_at: float | None = None  # None: it runs

    def is_stuck(self, status: RankStatus, timeout_s: float) -> bool:
        """Record a status; return whether the rank has made no step for too long."""
        steps, now = status.steps, status.at
        if steps != self.steps:
            if steps > 0 and not steps & FIRST_STEP:
                # The length of steps shorter than the time between two looks is not known.
                known = 0 < self.steps & ~FIRST_STEP < steps and self.seen > self.since
                self.longest_s = max(self.longest_s or 0.0, now - self.since if known else 0.0)
            self.steps, self.since = steps, now
        if status.waits or self.since == now:
            self.silent_since = now
        self.seen = now
        if steps <= 0:
            return False
        if self.longest_s is None:
            return now - self.since > ALLOWANCE * timeout_s
        return now - self.since > max(timeout_s, LONG_STEPS * self.longest_s)

    def is_stopped(self, status: RankStatus, now: float, timeout_s: float) -> bool:
        """Return whether the rank has been stopped for too long."""
        stopped = status.stopped or now - status.at > PAUSE_S
        self.stopped_at = (self.stopped_at or status.at) if stopped else None
        return self.stopped_at is not None and now - self.stopped_at > timeout_s


class HangWatch:
    """The watch over the ranks of a job."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._histories: dict[int, _History] = {}
        self._looked_at: float | None = None

    def look(self, statuses: Mapping[int, RankStatus], now: float) -> dict[int, str]:
        """Return the ranks that hang, each with the reason; none while one may still make progress."""
        passed, self._looked_at = now - (self._looked_at or now), now
        histories = {rank: self._histories.setdefault(rank, _History()) for rank in statuses}
        if passed > PAUSE_S:
            for history in histories.values():
                history.since += passed
                history.silent_since = history.silent_since and now
                history.stopped_at = None
            return {}
        limit_s = self._timeout_s
        stuck = [rank for rank, status in statuses.items() if histories[rank].is_stuck(status, limit_s)]
        late = [rank for rank, status in statuses.items() if histories[rank].is_stopped(status, now, limit_s)]
        if late or stuck:
            # Ranks that wait for a stopped one are as stuck as it is, and may be found first.
            stopped = [rank for rank in statuses if histories[rank].stopped_at is not None]
            if stopped:
                return {rank: STOPPED_WHY if statuses[rank].stopped else SILENT_WHY for rank in stopped}
        if busy := [rank for rank in stuck if not statuses[rank].waits]:
            return {rank: self._no_step(rank, now, "waited for no other rank: it hung") for rank in busy}
        if any(
            not status.waits or (status.steps > 0 and rank not in stuck) for rank, status in statuses.items()
        ):
            return {}  # They wait for one that works, or whose last step was seen a little later.
        return {rank: self._no_step(rank, now, "waited for the others as they did for it") for rank in stuck}

    def silent(self, statuses: Mapping[int, RankStatus], now: float) -> dict[int, str]:
        """Return a warning, once, for each rank that is silent for too long outside of steps."""
        warnings = dict[int, str]()
        for rank, status in statuses.items():
            history = self._histories[rank]
            since = history.silent_since
            if status.steps < 0 and since is not None and now - since > self._timeout_s:
                history.silent_since = None
                where = list(PHASES.values())[(-status.steps - 1) % MOST_PHASES]
                warnings[rank] = (
                    f"rank {rank} has made no progress for {now - since:.0f} s {where}; it prints the stacks "
                    "of its threads, and may go on"
                )
        return warnings

    def _no_step(self, rank: int, now: float, waited: str) -> str:
        return f"it made no step for {now - self._histories[rank].since:.0f} s, and {waited}"


class HostStatus:
    """The status of the ranks of this machine."""

    def __init__(self, arena: Arena, size: int) -> None:
        self._layout = ControlLayout(size)
        self._words = arena.words(FIRST, self._layout.words)

    def read(self, ranks: Sequence[int], now: float) -> dict[int, RankStatus]:
        """Return the status of some ranks; nothing while a debugger looks at one."""
        states = {rank: _state_of(self._word(rank, PID)) for rank in ranks}
        if "t" in states.values():
            return {}
        return {
            rank: RankStatus(self._word(rank, STEPS), bool(self._word(rank, WAITS)), now, state == "T")
            for rank, state in states.items()
        }

    def kill(self, ranks: Mapping[int, str]) -> None:
        """Make ranks that hang print their stacks, unless they are stopped, and kill them."""
        self.signal(ranks, STACKS)
        if STOPPED_WHY not in ranks.values():
            time.sleep(PRINTING_S)
        self.signal(ranks, signal.SIGKILL)

    def signal(self, ranks: Iterable[int], signum: int) -> None:
        """Send a signal to ranks."""
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self._word(rank, PID), signum)

    def _word(self, rank: int, word: int) -> int:
        return int(self._words[self._layout.line(rank) + word])


def _state_of(process: int) -> str:
    """Return the state of a process as /proc's letter; "X" if it is gone."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return "X"
