"""Ranks that hang: the supervisor sees that they make no step, has them print their stacks, and kills them.

    rank 0   step │ step │ waits for rank 1 ...............................
    rank 1   step │ step │ deadlock, or stopped ............... stacks ✝
    supervisor                         looks once a second    ─┘

A rank that trains stores the number of its steps, and all ranks whether they wait for another one: see
`tutti.comm.shm.layout`. Who waits is not to blame, unless all do. One that a
signal has stopped is lost whatever it does. Ranks of other hosts say both in the signs that they give to
the launching process (`tutti.launch.liveness`).

Before its first step, and between epochs, a rank may take any time to read data or to run the user's code. It
hangs there if it does nothing at all (`tutti.activity`), and nobody else does either:

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
from functools import cache
from typing import Final

from tutti.activity import Idleness
from tutti.comm.shm.arena import FIRST, Arena
from tutti.comm.shm.layout import BEAT, FIRST_STEP, PID, WAITS, ControlLayout
from tutti.launch.liveness import LivenessWatch, Sign
from tutti.launch.rank_processes import RankProcess
from tutti.terminal import warn_on_stderr

PRINTED: Final = "the stacks of its threads are printed above"

LOOK_S: Final = 1.0
"""Time between two looks."""

LONG_STEPS: Final = 10.0
"""The multiple of its longest step so far that a rank may take for one."""

ALLOWANCE: Final = 10.0
"""The multiple of the time-out that a rank may take for its first step, in which code may be compiled.

So long may it do nothing where it does not train, as behind a file system that takes a break."""

PAUSE_S: Final = 5.0
"""A longer time between two looks: this process was stopped itself, as by Ctrl-Z, and the ranks with it."""

PRINTING_S: Final = 0.5
"""Time of a rank to print its stacks."""

STACKS: Final = signal.SIGUSR2
"""The signal on which a rank that trains prints the stacks of its threads."""

STOPPED: Final = "T"
"""The state of a process that a signal has stopped."""

STOPPED_WHY: Final = "it was stopped by a signal (SIGSTOP), and nobody let it go on"

UNKNOWN: Final = "?"
"""The state of a process that cannot be read at the moment."""

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
        idle: what it does where it neither trains nor waits; None: it does one of them.
    """

    beat: int
    since: float
    seen: float = 0.0
    longest_s: float | None = None
    stopped_at: float | None = None
    idle: Idleness | None = None

    def is_stuck(self, beat: int, now: float, timeout_s: float) -> bool:
        """Note the last sign of a rank; tell whether it has been the same for too long."""
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
                course.stopped_at = course.idle = None
        stuck = [rank for rank, course in enumerate(self._courses) if self._is_stuck(rank, course, now)]
        lives = [one.rank for one in self._ranks if not one.ended]
        states = {rank: state_of(self._word(rank, PID)) for rank in lives}
        stand = [
            rank for rank, state in states.items() if self._stands_still(self._courses[rank], state, now)
        ]
        idle = [rank for rank in lives if self._is_idle(rank, self._courses[rank], now)]
        if self._done or _TRACED in states.values():
            return  # It is over, or somebody looks at it with a debugger.
        stopped = [rank for rank, state in states.items() if state == STOPPED]
        if stopped and (stuck or stand):
            self._lose(dict.fromkeys(stopped, STOPPED_WHY))
        elif found := self._guilty(lives, stuck, idle, now):
            self._lose(found)

    def _guilty(
        self, lives: Sequence[int], stuck: Sequence[int], idle: Sequence[int], now: float
    ) -> dict[int, str]:
        """The ranks that hang, with what each did; none if somebody may still get on, and the others with it.

        Args:
            lives: the ranks that have not ended.
            stuck: those that train, and have made no step for too long.
            idle: those that do something else, and have done nothing for too long.
            now: the time.
        """
        works = [rank for rank in lives if not self._word(rank, WAITS)]
        if busy := [rank for rank in stuck if rank in works]:
            return {rank: no_step(now - self._courses[rank].since, busy=True) for rank in busy}
        if not set(works) <= {*stuck, *idle}:
            return {}
        if idle:
            passed = ALLOWANCE * self._timeout_s
            why = f"it did nothing at all for {passed:.0f} s, and waited for no other rank: it hung"
            return dict.fromkeys(idle, why)
        return {rank: no_step(now - self._courses[rank].since, busy=False) for rank in stuck}

    def _lose(self, guilty: Mapping[int, str]) -> None:
        """Have ranks print their stacks, and kill them. Their deaths end the job."""
        self._done = True
        prints = STOPPED_WHY not in guilty.values()
        for rank, why in guilty.items():
            self._ranks[rank].hung = f"{why}; {PRINTED}" if prints else why
            with suppress(ProcessLookupError):
                os.kill(self._word(rank, PID), STACKS)
        if prints:
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

    def _is_idle(self, rank: int, course: _Course, now: float) -> bool:
        """Tell whether a rank that neither trains nor waits has done nothing for too long."""
        process = self._word(rank, PID)
        if not process or self._word(rank, BEAT) or self._word(rank, WAITS):
            course.idle = None
            return False
        if course.idle is None or course.idle.process != process:
            course.idle = Idleness(process, now)
        return course.idle.look(now) > ALLOWANCE * self._timeout_s

    def _word(self, rank: int, word: int) -> int:
        return int(self._words[self._layout.line(rank) + word])


def no_step(passed_s: float, busy: bool) -> str:
    """The reason for which a rank is lost that made no step for a time, and waited for no other if `busy`."""
    waited = "waited for no other rank: it hung" if busy else "waited for the others as they did for it"
    return f"it made no step for {passed_s:.0f} s, and {waited}"


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
        why = no_step(now - self._course((busy or stuck)[0]).since, bool(busy))
        return busy or stuck, f"{why}; {PRINTED}"

    def _course(self, rank: int) -> _Course:
        return self._courses.setdefault(rank, _Course(0, 0.0))

    def _is_stuck(self, rank: int, sign: Sign) -> bool:
        # By the times of the signs, between which there is a second, however often this is called.
        return self._course(rank).is_stuck(sign.beat, sign.at, self._timeout_s)

    def _is_silent(self, sign: Sign, now: float) -> bool:
        """Tell whether a rank gives no sign for too long; before it trains, code may keep it from that."""
        return now - sign.at > self._timeout_s * (1.0 if sign.beat else ALLOWANCE)


def state_of(pid: int) -> str:
    """The state of a process in one letter, as in /proc; "X" if it is gone, `UNKNOWN` if that cannot be read.

    A warning says so once: the ranks train on, though nobody sees when one is stopped.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    except OSError as error:
        _warn_once(error.strerror or str(error))
        return UNKNOWN


@cache
def _warn_once(problem: str) -> None:
    warn_on_stderr(
        f"the states of the ranks cannot be read from /proc ({problem}), and one that is stopped may go "
        f"unnoticed; if too many files are open, 'prlimit --pid {os.getpid()} --nofile=4096:' allows more"
    )
