"""Ranks that hang: they make no step, print their stacks, and are ended.

    rank 0   step │ step │ waits for rank 1 ...............................
    rank 1   step │ step │ deadlock, or stopped ............... stacks ✝
    supervisor                         looks once a second    ─┘

A rank that trains stores the number of its steps, and all ranks whether they wait for another one: see
`tutti.comm.shm.layout`. A rank that waits is not to blame, unless all do. One that a signal has stopped is
lost whatever it does. Ranks of other hosts send both (`tutti.launch.rank_connections`).

Before its first step, and between epochs, a rank may take any time to read data or to run the user's code. It
hangs there if it does nothing at all (`tutti.activity`), and no other rank does either:

    rank 0   waits for rank 1 .............................................
    rank 1   reads data: it computes, and moves bytes │ deadlock ...... stacks ✝

Needs no torch.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tutti.activity import Idleness
from tutti.comm.shm.arena import FIRST, Arena
from tutti.comm.shm.layout import BEAT, FIRST_STEP, PID, WAITS, ControlLayout

LOOK_S: Final = 1.0
"""Time between two looks."""

LONG_STEPS: Final = 10.0
"""The multiple of its longest step so far that a rank may take for one."""

ALLOWANCE: Final = 10.0
"""Factor on the time-out for the first step, in which code may be compiled.

Also for a rank that is idle outside of training steps, for example on a stalled file system."""

PAUSE_S: Final = 5.0
"""A longer time between two looks: this process was stopped itself, as by Ctrl-Z, and the ranks with it.

A rank of another host whose last sign is that much older than others is stopped."""

PRINTING_S: Final = 0.5
"""Time of a rank to print its stacks."""

STACKS: Final = signal.SIGUSR2
"""The signal on which a rank that trains prints the stacks of its threads."""

STOPPED_WHY: Final = "it was stopped by a signal (SIGSTOP), and nobody let it go on"

SILENT_WHY: Final = (
    "it gave no sign though its host answers: it was stopped by a signal (SIGSTOP), or something holds the "
    "interpreter's lock"
)


def print_stacks_when_asked() -> None:
    """Have this process print the stacks of its threads on `STACKS`, also while it runs no Python."""
    faulthandler.register(STACKS, all_threads=True)


def print_stacks() -> None:
    """Print the stacks of the threads of this process, which trains."""
    os.kill(os.getpid(), STACKS)


@dataclass(frozen=True)
class Sign:
    """The state of a rank.

    Attributes:
        beat: the number of its steps and 1, with `FIRST_STEP`; 0: it does something else than to train.
        waits: it has been waiting for other ranks for more than a moment.
        at: when that was so, by the monotonic clock.
        process: its number, if it is on this machine.
        stopped: a signal has stopped it.
    """

    beat: int
    waits: bool
    at: float = 0.0
    process: int = 0
    stopped: bool = False


@dataclass
class _RankHistory:
    """The past signs of a rank.

    Attributes:
        beat: the last step word that was read.
        since: when it last changed.
        seen: when it was last read.
        longest_s: the longest time of a step so far; None: it has finished none.
        stopped_at: the time since when it is stopped by a signal; None: it is not.
        idle: what it does where it neither trains nor waits; None: it does one of them.
    """

    beat: int = 0
    since: float = 0.0
    seen: float = 0.0
    longest_s: float | None = None
    stopped_at: float | None = None
    idle: Idleness | None = None

    def is_stuck(self, sign: Sign, timeout_s: float) -> bool:
        """Note a sign; return whether the rank has made no step for too long."""
        beat, now = sign.beat, sign.at
        if beat != self.beat:
            if beat and not beat & FIRST_STEP:
                # Steps that are shorter than the time between two looks have no length that is known.
                known = 0 < self.beat & ~FIRST_STEP < beat and self.seen > self.since
                self.longest_s = max(self.longest_s or 0.0, now - self.since if known else 0.0)
            self.beat, self.since = beat, now
        self.seen = now
        if not beat:
            return False
        if self.longest_s is None:
            return now - self.since > ALLOWANCE * timeout_s
        return now - self.since > max(timeout_s, LONG_STEPS * self.longest_s)

    def is_stopped(self, sign: Sign, now: float, timeout_s: float) -> bool:
        """Return whether the rank has been stopped for too long, whether it makes steps or not."""
        stopped = sign.stopped or now - sign.at > PAUSE_S
        self.stopped_at = (self.stopped_at or sign.at) if stopped else None
        return self.stopped_at is not None and now - self.stopped_at > timeout_s

    def is_idle(self, sign: Sign, now: float, timeout_s: float) -> bool:
        """Return whether the rank neither trains nor waits, and has done nothing for too long."""
        if not sign.process or sign.beat or sign.waits:
            self.idle = None
            return False
        if self.idle is None or self.idle.process != sign.process:
            self.idle = Idleness(sign.process, now)
        return self.idle.look(now) > ALLOWANCE * timeout_s


class HangWatch:
    """The watch over the ranks of a job.

    Args:
        timeout_s: the time in which each rank that trains has to make a step.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._histories: dict[int, _RankHistory] = {}
        self._looked_at: float | None = None

    def look(self, signs: Mapping[int, Sign], now: float) -> dict[int, str]:
        """Return the ranks that hang, with what each did; none as long as one may still get on.

        Args:
            signs: of the ranks that have not ended.
            now: the time, by the monotonic clock.
        """
        passed, self._looked_at = now - (self._looked_at or now), now
        histories = {rank: self._histories.setdefault(rank, _RankHistory()) for rank in signs}
        if passed > PAUSE_S:
            for history in histories.values():
                history.since += passed
                history.stopped_at = history.idle = None
            return {}
        limit_s = self._timeout_s
        stuck = [rank for rank, sign in signs.items() if histories[rank].is_stuck(sign, limit_s)]
        idle = [rank for rank, sign in signs.items() if histories[rank].is_idle(sign, now, limit_s)]
        late = [rank for rank, sign in signs.items() if histories[rank].is_stopped(sign, now, limit_s)]
        if late or stuck:
            # Ranks that wait for a stopped one are as stuck as it is, and may be found first.
            stopped = [rank for rank in signs if histories[rank].stopped_at is not None]
            if stopped:
                return {rank: STOPPED_WHY if signs[rank].stopped else SILENT_WHY for rank in stopped}
        works = [rank for rank, sign in signs.items() if not sign.waits]
        if busy := [rank for rank in stuck if rank in works]:
            return {rank: self._no_step(rank, now, "waited for no other rank: it hung") for rank in busy}
        if not set(works) <= {*stuck, *idle}:
            return {}
        if idle:
            idle_s = ALLOWANCE * limit_s
            why = f"it did nothing at all for {idle_s:.0f} s, and waited for no other rank: it hung"
            return dict.fromkeys(idle, why)
        if any(sign.beat and rank not in stuck for rank, sign in signs.items()):
            return {}  # They wait for one whose last step was noted a little later.
        return {rank: self._no_step(rank, now, "waited for the others as they did for it") for rank in stuck}

    def _no_step(self, rank: int, now: float, waited: str) -> str:
        return f"it made no step for {now - self._histories[rank].since:.0f} s, and {waited}"


class HostSigns:
    """The signs of the ranks of this machine.

    Args:
        arena: theirs.
        size: the number of ranks, servers included.
    """

    def __init__(self, arena: Arena, size: int) -> None:
        self._layout = ControlLayout(size)
        self._words = arena.words(FIRST, self._layout.words)

    def read(self, ranks: Sequence[int], now: float) -> dict[int, Sign]:
        """Return the signs of some ranks; none while a debugger looks at one."""
        states = {rank: _state_of(self._word(rank, PID)) for rank in ranks}
        if "t" in states.values():
            return {}
        return {
            rank: Sign(
                self._word(rank, BEAT),
                bool(self._word(rank, WAITS)),
                now,
                self._word(rank, PID),
                state == "T",
            )
            for rank, state in states.items()
        }

    def kill(self, ranks: Mapping[int, str]) -> None:
        """Have ranks that hang print their stacks, unless they are stopped, and kill them."""
        for signum in (STACKS, signal.SIGKILL):
            for rank in ranks:
                with suppress(ProcessLookupError):
                    os.kill(self._word(rank, PID), signum)
            if signum == STACKS and STOPPED_WHY not in ranks.values():
                time.sleep(PRINTING_S)

    def _word(self, rank: int, word: int) -> int:
        return int(self._words[self._layout.line(rank) + word])


def _state_of(process: int) -> str:
    """Return the state of a process in one letter, as in /proc; "X" if it is gone."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except OSError:
        return "X"
