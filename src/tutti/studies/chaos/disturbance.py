"""A running training is disturbed by a script, and how long each fault costs it is taken. No torch.

fault ──► the training says who is lost, and why ──► all ranks have made a step ──► as far as before
      └───────────────────────── next_s ──────────────────────────┘                        │
      └───────────────────────── back_s ───────────────────────────────────────────────────┘
"""

from __future__ import annotations

import resource
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Final

import psutil

from tutti.errors import BadRunFolder
from tutti.run.resize import resize
from tutti.studies.chaos.running_ranks import RankSeen, RunningRanks, Victim, unseen
from tutti.studies.chaos.script import (
    ADD,
    FULL_DISK,
    KILL_AGAIN,
    KILL_FIRST,
    KILL_TWO,
    KINDS,
    REMOVE,
    SLOW,
    STOP,
    Moment,
)
from tutti.studies.chaos.training import LossSaid, Training

PATIENCE_S: Final = 120.0
"""Time of a training to go on before it counts as hung, besides that in which it finds what hangs."""

SLOW_S: Final = 2.0
"""Duration of a fault after which nothing is lost."""

_STOPPED_S, _RUNNING_S = 0.045, 0.015
"""The turns of a rank that is slowed."""

_QUICK_S: Final = 0.001
"""Time between two looks at ranks that are about to go on."""

_BACK_S: Final = 0.01
"""Time between two looks until the training is as far as it was: looks take time from it."""

_CALM_S: Final = 0.02
"""Time between two looks at ranks that train."""

MORE: Final = 2
"""So many ranks more than at first are asked for."""

Ranks = dict[int, RankSeen]


@dataclass
class Event:
    """A fault, and what became of it.

    Attributes:
        at_s: seconds from the first step of the training to the fault.
        kind: of the fault.
        ranks: who was hit.
        said: what the training has said of lost ranks.
        named: whether that is who was hit, and by what; of faults that cost no rank, that nobody is lost.
        survived: all ranks have made another step, or the training came to its end.
        next_s: seconds until all had made it, from the fault on, or from its end if it cost no rank; None:
            never, or the training had come to its end.
        redone: the steps that were made again.
        back_s: seconds until the training was as far as before; None: the next fault or the end came first.
    """

    at_s: float
    kind: str
    ranks: tuple[int, ...]
    said: tuple[LossSaid, ...] = ()
    named: bool = False
    survived: bool = False
    next_s: float | None = None
    redone: int = 0
    back_s: float | None = None


@dataclass(frozen=True)
class Promise:
    """The losses that a training is to survive.

    Attributes:
        replaces: new ranks take the places of lost ones; else there are fewer.
        losses: how many, in an hour.
        hang_timeout_s: after how long a rank that hangs is lost; None: never.
    """

    replaces: bool
    losses: int
    hang_timeout_s: float | None


class Disturbance:
    """The faults of one training.

    Args:
        training: has just been started.
        promise: what it is to survive.
        tell: is told of each event once the training goes on.

    Attributes:
        events: so far.
        began: the time of its first step; None: it has made none.
        alarms: losses that it has reported without a fault.
        hung: it did not go on, and was ended.
    """

    def __init__(self, training: Training, promise: Promise, tell: Callable[[Event], None]) -> None:
        self.events: list[Event] = []
        self.began: float | None = None
        self.alarms: list[LossSaid] = []
        self.hung = False
        self._training, self._promise, self._tell = training, promise, tell
        self._ranks = RunningRanks(training.process.pid)
        self._workers: set[int] = set()
        self._most = 0
        self._losses_left = promise.losses
        self._heard = self._furthest = 0
        self._behind: tuple[Event, float, int] | None = None

    def follow(self, script: Iterator[Moment], kinds: Collection[str], most: int | None) -> None:
        """Disturb the training until it is over.

        Args:
            script: the lines to follow.
            kinds: the kinds of faults in it; it ends when none is possible by which ranks go or come.
            most: how many faults there are at most; None: as many as the training is to survive.
        """
        if not self._begin():
            return
        decisive = [kind for kind in kinds if KINDS[kind].losses or kind in (ADD, REMOVE)] or kinds
        for moment in script:
            if len(self.events) == most or not any(map(self._is_possible, decisive)):
                break
            if not self._is_possible(moment.kind):
                continue
            if not self._calm(moment.pause_s):
                return
            self._cause(moment)
            if self.hung:
                return
        while self._calm(1.0):
            pass

    def _begin(self) -> bool:
        """Wait until all ranks make steps; returns whether they do."""
        while not self._training.over:
            ranks = self._ranks.look()
            if self.began is None and any(one.steps is not None for one in ranks.values()):
                self.began = time.monotonic()
            self._note_steps(ranks)
            self._workers |= {rank for rank, one in ranks.items() if one.steps is not None}
            if self.began is not None and time.monotonic() > self.began + 0.5:
                self._most = len(self._workers) + MORE
                return True
            time.sleep(_CALM_S)
        return False

    def _is_possible(self, kind: str) -> bool:
        """Tell whether the training is to survive one more fault of a kind."""
        fault, workers = KINDS[kind], len(self._workers)
        if fault.losses > self._losses_left or fault.least > workers:
            return False
        if kind == STOP and self._promise.hang_timeout_s is None:
            return False
        if kind == ADD and workers >= self._most:
            return False
        return self._promise.replaces or fault.victims < workers

    def _calm(self, seconds: float) -> bool:
        """Let it train for a while; returns False if it is over."""
        until = time.monotonic() + seconds
        while not self._training.over and time.monotonic() < until:
            ranks = self._ranks.look()
            self._note_steps(ranks)
            self._note_progress(ranks)
            self.alarms += self._news()
            time.sleep(_CALM_S if self._behind is None else _BACK_S)
        return not self._training.over

    def _note_steps(self, ranks: Ranks) -> None:
        # Between two epochs nobody tells of steps.
        self._furthest = max(self._furthest, *(one.steps or 0 for one in ranks.values()), 0)

    def _note_progress(self, ranks: Ranks) -> None:
        """Note when the training is as far as before the last fault."""
        if self._behind is not None:
            event, since, furthest = self._behind
            if any(one.steps is not None and one.steps >= furthest for one in ranks.values()):
                event.back_s = time.monotonic() - since
                self._behind = None

    def _news(self) -> list[LossSaid]:
        """What it has said since the last call."""
        found = self._training.losses[self._heard :]
        self._heard += len(found)
        return found

    def _cause(self, moment: Moment) -> None:
        ranks = self._ranks.look()
        hit = _chosen(moment, ranks)
        if not hit or self.began is None:
            return
        self._note_steps(ranks)
        furthest, self._furthest, self._behind = self._furthest, 0, None
        now = time.monotonic()
        event = Event(now - self.began, moment.kind, hit)
        self.events.append(event)
        said: list[LossSaid] = []
        replaced: set[int] = set()
        if KINDS[moment.kind].losses:
            over = self._lose(moment, event, ranks, said)
        elif moment.kind in (ADD, REMOVE):
            over = self._resize(event)
            replaced = {one.process for one in ranks.values()}
            now = time.monotonic()
        else:
            over = self._disturb(event, ranks)
            now = time.monotonic()
        if not over:
            over = self._wait_for_step(event, now, furthest, replaced)
        said += self._news()
        event.said, event.named = tuple(said), is_named(event.kind, event.ranks, said)
        event.survived = event.next_s is not None or (over and self._training.wait() == 0)
        if not over and event.next_s is None:
            self.hung = True
            self._training.end()
        self._losses_left -= max(len(said), KINDS[event.kind].losses)
        self._tell(event)

    def _lose(self, moment: Moment, event: Event, ranks: Ranks, said: list[LossSaid]) -> bool:
        """Have ranks lost, and wait until the training says so; returns whether it is over."""
        groups = self._ranks.groups()
        with _victims(ranks, event.ranks) as victims:
            with unseen([ranks[rank].process for rank in event.ranks] if event.kind == KILL_TWO else []):
                for victim in victims:
                    victim.send(signal.SIGSTOP if event.kind == STOP else signal.SIGKILL)
            over = self._wait_for_loss(event.kind, said)
        if event.kind == KILL_AGAIN and not over:
            known = {one.process for one in ranks.values()}
            new: Ranks = {}
            while not new and not self._training.over:
                new = self._ranks.successors(groups, known)
                time.sleep(_QUICK_S)
            second = sorted(new)[int(moment.draw * len(new))] if new else None
            if second is not None:
                event.ranks += (second,)
                with _victims(new, [second]) as victims:
                    victims[0].send(signal.SIGKILL)
                over = self._wait_for_loss(event.kind, said)
        if not self._promise.replaces:
            lost = sum(rank in self._workers for loss in said for rank in loss.ranks)
            self._workers = set(range(len(self._workers) - lost))
        return over

    def _wait_for_loss(self, kind: str, said: list[LossSaid]) -> bool:
        """Wait until it says who is lost, and goes on; returns whether it is over."""
        deadline = time.monotonic() + PATIENCE_S
        if kind == STOP:
            deadline += self._promise.hang_timeout_s or 0.0
        while not (news := self._news()):
            if self._training.over or time.monotonic() > deadline:
                break
            time.sleep(_QUICK_S)
        said += news
        return self._training.over

    def _resize(self, event: Event) -> bool:
        """Ask for one rank more or fewer, and wait until it is agreed to; returns whether it is over."""
        before = len(self._workers)
        workers = before + (1 if event.kind == ADD else -1)
        event.ranks = (max(before, workers) - 1,)
        with suppress(BadRunFolder):  # It has come to its end.
            resize(self._training.folder, workers)
            self._workers = set(range(workers))
        return self._training.over

    def _disturb(self, event: Event, ranks: Ranks) -> bool:
        """Do what costs no rank, to its end; returns whether the training is over."""
        until = time.monotonic() + SLOW_S
        with _victims(ranks, event.ranks) as victims:
            if event.kind == FULL_DISK:
                with _no_room(self._training.process.pid):
                    while time.monotonic() < until and not self._training.over:
                        time.sleep(_CALM_S)
            while event.kind == SLOW and time.monotonic() < until and not self._training.over:
                for victim in victims:
                    victim.send(signal.SIGSTOP)
                time.sleep(_STOPPED_S)
                for victim in victims:
                    victim.send(signal.SIGCONT)
                time.sleep(_RUNNING_S)
        return self._training.over

    def _wait_for_step(self, event: Event, since: float, furthest: int, replaced: Collection[int]) -> bool:
        """Wait until all ranks have made a step; returns whether it is over.

        Args:
            event: the fault.
            since: when they were to go on.
            furthest: the step before it.
            replaced: processes that are to go, whose steps do not count.
        """
        deadline = time.monotonic() + PATIENCE_S
        first: dict[int, tuple[int, int]] = {}
        moved: set[int] = set()
        while not self._training.over and time.monotonic() < deadline:
            for rank, one in self._ranks.look().items():
                if one.steps is None or one.process in replaced:
                    continue
                process, steps = first.setdefault(rank, (one.process, one.steps))
                if process != one.process:
                    first[rank] = one.process, one.steps
                    moved.discard(rank)
                elif one.steps != steps:
                    moved.add(rank)
            if moved >= self._workers:
                event.next_s = time.monotonic() - since
                break
            time.sleep(_QUICK_S)
        if first:
            event.redone = max(0, furthest - max(steps for _, steps in first.values()))
            self._behind = event, since, furthest
        return self._training.over


def is_named(kind: str, ranks: Collection[int], said: Collection[LossSaid]) -> bool:
    """Tell whether what a training has said of lost ranks is who was hit by a fault, and by what."""
    causes = "SIGSTOP" if kind == STOP else "SIGKILL"
    if KINDS[kind].losses == 0:
        return not said
    if not all(causes in loss.why for loss in said) or len(said) != KINDS[kind].losses:
        return False
    return sorted(rank for loss in said for rank in loss.ranks) == sorted(ranks)


def _chosen(moment: Moment, ranks: Ranks) -> tuple[int, ...]:
    """The ranks that a fault hits; none if there are too few."""
    known = sorted(ranks)
    if len(known) < KINDS[moment.kind].least or not known:
        return ()
    if moment.kind == FULL_DISK:
        return tuple(known)
    first = 0 if moment.kind == KILL_FIRST else int(moment.draw * len(known))
    if moment.kind == KILL_TWO:
        return tuple(sorted({known[first], known[(first + 1) % len(known)]}))
    return (known[first],)


@contextmanager
def _victims(ranks: Ranks, hit: Collection[int]) -> Iterator[list[Victim]]:
    victims = [Victim(ranks[rank].process) for rank in hit]
    try:
        yield victims
    finally:
        for victim in victims:
            victim.close()


@contextmanager
def _no_room(starter: int) -> Iterator[None]:
    """Let the ranks of a training, and what they have started, write no file to its end."""
    before: dict[int, tuple[int, int]] = {}
    with suppress(psutil.NoSuchProcess):
        for server in psutil.Process(starter).children():
            for one in server.children(recursive=True):
                with suppress(ProcessLookupError, PermissionError):
                    soft, hard = resource.prlimit(one.pid, resource.RLIMIT_FSIZE)
                    resource.prlimit(one.pid, resource.RLIMIT_FSIZE, (0, hard))
                    before[one.pid] = soft, hard
    try:
        yield
    finally:
        for process, limits in before.items():
            with suppress(ProcessLookupError, PermissionError):
                resource.prlimit(process, resource.RLIMIT_FSIZE, limits)
