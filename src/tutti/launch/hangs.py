"""Ranks that hang: the supervisor sees that they make no step, has them print their stacks, and kills them.

    rank 0   step │ step │ waits for rank 1 ...............................
    rank 1   step │ step │ deadlock, or stopped ............... stacks ✝
    supervisor                         looks once a second    ─┘

A rank that trains stores the number of its steps, and all ranks whether they wait for another one: see
`tutti.comm.shm.layout`. Who waits is not to blame, unless all do. One that a
signal has stopped is lost whatever it does. Needs no torch.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from tutti.comm.shm.arena import FIRST, Arena
from tutti.comm.shm.layout import BEAT, PID, WAITS, ControlLayout
from tutti.launch.rank_processes import RankProcess

LOOK_S: Final = 1.0
"""Time between two looks."""

LONG_STEPS: Final = 10.0
"""The multiple of its longest step so far that a rank may take for one."""

FIRST_STEP: Final = 10.0
"""The multiple of the time-out that a rank may take for its first step, in which code may be compiled."""

PAUSE_S: Final = 5.0
"""A longer time between two looks: this process was stopped itself, as by Ctrl-Z, and the ranks with it."""

PRINTING_S: Final = 0.5
"""Time of a rank to print its stacks."""

STACKS: Final = signal.SIGUSR2
"""The signal on which a rank that trains prints the stacks of its threads."""

STOPPED: Final = "T"
"""The state of a process that a signal has stopped."""

_TRACED: Final = "t"


def print_stacks_when_asked() -> None:
    """Have this process print the stacks of its threads on `STACKS`, also while it runs no Python."""
    faulthandler.register(STACKS, all_threads=True)


@dataclass
class _Course:
    """The course of a rank.

    Attributes:
        beat: its last sign.
        since: the time since when it is that.
        seen: the time of the last look, at which it was that.
        longest_s: the longest time of a step so far; None: it has finished none.
        stopped_at: the time since when it is stopped by a signal; None: it is not.
    """

    beat: int
    since: float
    seen: float = 0.0
    longest_s: float | None = None
    stopped_at: float | None = None


class HangWatch:
    """The watch over the ranks of a job.

    Args:
        arena: theirs.
        ranks: the processes, servers included.
        timeout_s: the time in which each rank that trains has to make a step.
    """

    def __init__(self, arena: Arena, ranks: Sequence[RankProcess], timeout_s: float) -> None:
        self._ranks, self._timeout_s = ranks, timeout_s
        self._layout = ControlLayout(len(ranks))
        self._words = arena.words(FIRST, self._layout.words)
        self._courses = [_Course(0, 0.0) for _ in ranks]
        self._looked_at: float | None = None
        self._done = False

    def look(self, now: float) -> None:
        """Kill the ranks that hang, if there are any.

        Args:
            now: the time in seconds, of a clock that never goes back.
        """
        passed, self._looked_at = now - (self._looked_at or now), now
        if passed > PAUSE_S:
            for course in self._courses:
                course.since += passed
                course.stopped_at = None
        stuck = [rank for rank, course in enumerate(self._courses) if self._is_stuck(rank, course, now)]
        states = {one.rank: state_of(self._word(one.rank, PID)) for one in self._ranks if not one.ended}
        stand = [
            rank for rank, state in states.items() if self._stands_still(self._courses[rank], state, now)
        ]
        if not (stuck or stand) or self._done:
            return
        if _TRACED in states.values():
            return  # Somebody looks at it with a debugger.
        # Their deaths end the job.
        self._done = True
        stopped = [rank for rank, state in states.items() if state == STOPPED]
        busy = [rank for rank in stuck if not self._word(rank, WAITS)]
        guilty = stopped or busy or stuck
        for rank in guilty:
            self._ranks[rank].hung = self._why(rank, rank in stopped, rank in busy, now)
            with suppress(ProcessLookupError):
                os.kill(self._word(rank, PID), STACKS)
        if not stopped:
            time.sleep(PRINTING_S)
        for rank in guilty:
            with suppress(ProcessLookupError):
                os.kill(self._word(rank, PID), signal.SIGKILL)

    def _is_stuck(self, rank: int, course: _Course, now: float) -> bool:
        beat = self._word(rank, BEAT)
        if beat != course.beat:
            if course.beat and beat > course.beat:
                # Steps that are shorter than the time between two looks have no length that is known.
                length_s = now - course.since if course.seen > course.since else 0.0
                course.longest_s = max(course.longest_s or 0.0, length_s)
            course.beat, course.since = beat, now
        course.seen = now
        if not beat or self._ranks[rank].ended:
            return False
        if course.longest_s is None:
            return now - course.since > FIRST_STEP * self._timeout_s
        return now - course.since > max(self._timeout_s, LONG_STEPS * course.longest_s)

    def _stands_still(self, course: _Course, state: str, now: float) -> bool:
        """Tell whether a rank was stopped for too long, whether it makes steps or not."""
        if state != STOPPED:
            course.stopped_at = None
            return False
        course.stopped_at = now if course.stopped_at is None else course.stopped_at
        return now - course.stopped_at > self._timeout_s

    def _why(self, rank: int, stopped: bool, busy: bool, now: float) -> str:
        passed = f"it made no step for {now - self._courses[rank].since:.0f} s"
        if stopped:
            return "it was stopped by a signal (SIGSTOP), and nobody let it go on"
        where = "the stacks of its threads are printed above"
        if busy:
            return f"{passed}, and waited for no other rank: it hung; {where}"
        return f"{passed}, and waited for the others as they did for it; {where}"

    def _word(self, rank: int, word: int) -> int:
        return int(self._words[self._layout.line(rank) + word])


def state_of(pid: int) -> str:
    """The state of a process in one letter, as in /proc; "X" if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return "X"
