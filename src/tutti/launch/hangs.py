"""Ranks that hang: the supervisor sees that they make no step, has them print their stacks, and kills them.

    rank 0   step │ step │ waits for rank 1 ...............................
    rank 1   step │ step │ deadlock, or stopped ............... stacks ✝
    supervisor                         looks once a second    ─┘

A rank that trains stores the number of its steps, and all ranks whether they wait for another one: see
`tutti.comm.shm.layout`. Who waits is not to blame, unless all do. One that a
signal has stopped is lost whatever it does. Ranks of other hosts say both in the signs that they give to
the launching process (`tutti.launch.liveness`). Needs no torch.
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
from tutti.launch.liveness import LivenessWatch, Sign
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


def print_stacks() -> None:
    """Print the stacks of the threads of this process, which trains."""
    os.kill(os.getpid(), STACKS)


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

    def is_stuck(self, beat: int, now: float, timeout_s: float) -> bool:
        """Note the last sign of a rank; tell whether it has been the same for too long."""
        if beat != self.beat:
            if self.beat and beat > self.beat:
                # Steps that are shorter than the time between two looks have no length that is known.
                length_s = now - self.since if self.seen > self.since else 0.0
                self.longest_s = max(self.longest_s or 0.0, length_s)
            self.beat, self.since = beat, now
        self.seen = now
        if not beat:
            return False
        if self.longest_s is None:
            return now - self.since > FIRST_STEP * timeout_s
        return now - self.since > max(timeout_s, LONG_STEPS * self.longest_s)


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
        stuck = course.is_stuck(self._word(rank, BEAT), now, self._timeout_s)
        return stuck and not self._ranks[rank].ended

    def _stands_still(self, course: _Course, state: str, now: float) -> bool:
        """Tell whether a rank was stopped for too long, whether it makes steps or not."""
        if state != STOPPED:
            course.stopped_at = None
            return False
        course.stopped_at = now if course.stopped_at is None else course.stopped_at
        return now - course.stopped_at > self._timeout_s

    def _why(self, rank: int, stopped: bool, busy: bool, now: float) -> str:
        if stopped:
            return "it was stopped by a signal (SIGSTOP), and nobody let it go on"
        return no_step(now - self._courses[rank].since, busy)

    def _word(self, rank: int, word: int) -> int:
        return int(self._words[self._layout.line(rank) + word])


def no_step(passed_s: float, busy: bool) -> str:
    """The reason for which a rank is lost that made no step for a time, and waited for no other if `busy`."""
    waited = "waited for no other rank: it hung" if busy else "waited for the others as they did for it"
    return f"it made no step for {passed_s:.0f} s, and {waited}; the stacks of its threads are printed above"


class RemoteHangWatch:
    """The watch over ranks on several hosts, by the signs that come of them.

    Args:
        watch: over the connections of the ranks.
        timeout_s: the time in which each rank that trains has to make a step.
    """

    def __init__(self, watch: LivenessWatch, timeout_s: float) -> None:
        self._watch, self._timeout_s = watch, timeout_s
        self._courses: dict[int, _Course] = {}
        self._looked_at: float | None = None

    def look(self, now: float) -> tuple[list[int], str]:
        """The ranks that hang, and the reason for which they are lost.

        They are asked for their stacks.

        Args:
            now: the time, by the monotonic clock.
        """
        passed, self._looked_at = now - (self._looked_at or now), now
        signs = {rank: self._watch.signs[rank] for rank in self._watch.left if rank in self._watch.signs}
        if passed > PAUSE_S:  # This process was stopped, and the signs wait to be read.
            for rank, sign in signs.items():
                sign.at = now
                self._course(rank).since += passed
        stuck = [rank for rank, sign in signs.items() if self._is_stuck(rank, sign)]
        if not stuck and not any(self._is_silent(sign, now) for sign in signs.values()):
            return [], ""
        # Those that wait for one which does not run are as stuck as it is, and may be seen to be so first.
        if still := [rank for rank, sign in signs.items() if now - sign.at > PAUSE_S]:
            longest_s = max(now - signs[rank].at for rank in still)
            if longest_s < self._watch.address.silence_s + PAUSE_S:
                return [], ""  # By then it would be known that the host does not answer either.
            return still, (
                f"it has not run for {longest_s:.0f} s, though its host answers: it was stopped by a signal "
                "(SIGSTOP), or something holds the interpreter's lock"
            )
        busy = [rank for rank in stuck if not signs[rank].waits]
        if not busy and any(sign.beat and rank not in stuck for rank, sign in signs.items()):
            return [], ""  # They wait for one whose last step was noted a little later.
        for rank in busy or stuck:
            self._watch.ask_for_stacks(rank)
        return busy or stuck, no_step(now - self._course((busy or stuck)[0]).since, bool(busy))

    def _course(self, rank: int) -> _Course:
        return self._courses.setdefault(rank, _Course(0, 0.0))

    def _is_stuck(self, rank: int, sign: Sign) -> bool:
        # By the times of the signs, between which there is a second, however often this is called.
        return self._course(rank).is_stuck(sign.beat, sign.at, self._timeout_s)

    def _is_silent(self, sign: Sign, now: float) -> bool:
        """Tell whether a rank gives no sign for too long; before it trains, code may keep it from that."""
        return now - sign.at > self._timeout_s * (1.0 if sign.beat else FIRST_STEP)


def state_of(pid: int) -> str:
    """The state of a process in one letter, as in /proc; "X" if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return "X"
