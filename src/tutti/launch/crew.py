"""A crew: ranks of this machine that begin together, and of which the first failure ends all. No torch.

A rank ends in one of three ways: it reports that it is done, it reports an exception, or it dies without a
report (which the fork server, its parent, sees at once).

    crew ◀── RankEnded ── fork server
         ◀── report ───── rank 0 ┐
         ◀── report ───── rank 1 ├─ one anonymous file: the arena
         ◀── report ───── rank 2 ┘
"""

from __future__ import annotations

import os
import selectors
import time
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, cast

from tutti.comm.shm.arena import FIRST, Arena
from tutti.comm.shm.layout import PID, PREPARED, ControlLayout
from tutti.errors import PeerLost, TuttiError, UserError
from tutti.launch.exit_reports import Report, cause
from tutti.launch.fork_server_client import RankForker
from tutti.launch.hangs import LOOK_S, STOPPED, HangWatch, state_of
from tutti.launch.output_relay import Relay
from tutti.launch.placement import Placement
from tutti.launch.rank_processes import (
    RankProcess,
    RankSetting,
    note_server_message,
    out_of_memory_kills,
    start_ranks,
)

CAUSE_S: Final = 1.0
"""The wait for the cause, after a rank has reported that it lost a peer."""

TOGETHER_S: Final = 0.1
"""Time after a death in which other ranks are lost together with the first one."""

FINISH_S: Final = 10.0
"""Time of a rank that is done to exit."""


class Orders(NamedTuple):
    """The work of a crew.

    Attributes:
        payload: handed to the entry.
        placement: of the ranks.
        waits: the ranks may begin before those are gone that they replace: they prepare themselves and wait.
    """

    payload: bytes
    placement: Placement
    waits: bool = False


@dataclass(frozen=True)
class Outcome:
    """The end of a crew's work.

    Attributes:
        error: the failure that came first; None: rank 0 has reported a result.
        begun: all ranks could be started.
    """

    error: TuttiError | None
    begun: bool = True


class Crew:
    """The ranks, from their start on.

    Args:
        server: forks them.
        entry: the function that each calls, as "package.module:function".
        orders: of these ranks.
        stop: the file of their `StopPage`.
        relay: takes what they print.
        hang_timeout_s: the time in which each has to make a step; None: any.

    Attributes:
        orders: the same.
    """

    def __init__(
        self,
        server: RankForker,
        entry: str,
        orders: Orders,
        stop: int,
        relay: Relay | None = None,
        hang_timeout_s: float | None = None,
    ) -> None:
        self.orders, self._server = orders, server
        self._kills_before = out_of_memory_kills()
        self._deadline: float | None = None
        self._all_ended_at_once = False
        with ExitStack() as stack:
            self._arena = arena = stack.enter_context(closing(Arena.create()))
            settings = _settings(orders.placement, relay)
            self._ranks = start_ranks(stack, server, entry, orders.payload, settings, stop, arena)
            self._hangs = None if hang_timeout_s is None else HangWatch(arena, self._ranks, hang_timeout_s)
            self._opened = stack.pop_all()

    def register(self, selector: selectors.BaseSelector) -> None:
        """Have a selector wait for what comes of them; the data of its keys are to be called then."""
        selector.register(self._server.control, selectors.EVENT_READ, self._note_message)
        for one in self._ranks:
            selector.register(one.pipe, selectors.EVENT_READ, partial(_receive, selector, one))

    def unregister(self, selector: selectors.BaseSelector) -> None:
        """Have a selector wait no more."""
        selector.unregister(self._server.control)
        for one in self._ranks:
            if one.pipe in selector.get_map():
                selector.unregister(one.pipe)

    def patience_s(self) -> float | None:
        """Time to wait for events before `outcome` is to be asked again; None: until there is one."""
        limits = [] if self._hangs is None else [LOOK_S]
        if self._deadline is not None:
            limits.append(max(0.0, self._deadline - time.monotonic()))
        return min(limits, default=None)

    def outcome(self, watched: bool = True) -> Outcome | None:
        """How its work has ended; None: it goes on.

        Args:
            watched: ranks that hang are killed.
        """
        if self._server.refused:
            return Outcome(UserError(self._server.refused), begun=False)
        if self._hangs is not None and watched:
            self._hangs.look(time.monotonic())
        reports = [one.report for one in self._ranks if one.report]
        deaths = [one.death for one in self._ranks if one.death]
        error, certain = cause(reports, deaths)
        if certain:
            if self._all_ended_at_once:
                return Outcome(PeerLost([], f"the process that forked all ranks ended: {deaths[0].why()}"))
            if not deaths:
                return Outcome(error)
            self._deadline = min(death.at for death in deaths) + TOGETHER_S
        elif error is not None:
            self._deadline = self._deadline or time.monotonic() + CAUSE_S
        elif len(reports) == len(self._ranks):
            # They may have threads and children to end.
            self._deadline = self._deadline or time.monotonic() + FINISH_S
        over = self._deadline is not None and time.monotonic() >= self._deadline
        return Outcome(error) if over or all(one.ended for one in self._ranks) else None

    @property
    def is_prepared(self) -> bool:
        """Whether all ranks wait to be needed, and can go on at once: none has ended or was stopped."""
        words = self._arena.words(FIRST, ControlLayout(len(self._ranks)).words)
        over = any(one.ended or one.report for one in self._ranks)
        stopped = STOPPED in map(state_of, self._processes())
        return bool(words[PREPARED]) and not over and not stopped

    @property
    def starved(self) -> bool:
        """Whether the kernel has ended a process of this machine meanwhile, for lack of memory."""
        return out_of_memory_kills() > self._kills_before

    @property
    def answers(self) -> bool:
        """Whether that server has ended the ranks when it was told to, or is gone, and they with it."""
        return self._server.answers

    @property
    def result(self) -> bytes:
        """The pickled result of rank 0, which has reported it."""
        return cast("bytes", cast("Report", self._ranks[0].report).value)

    def kill(self) -> None:
        """Have the ranks killed, and what they have started; `end` is to be called all the same."""
        self._server.kill()

    def end(self, grace_s: float) -> None:
        """End the ranks, what they have started, and the server.

        Args:
            grace_s: how long they may take to exit on SIGTERM, before SIGKILL.
        """
        self._server.clear(grace_s)
        self._server.close()
        self.close()

    def close(self) -> None:
        """Give up the pipes and the arena."""
        self._opened.close()

    def _processes(self) -> list[int]:
        """The numbers of the processes; 0 where it is not known yet."""
        layout = ControlLayout(len(self._ranks))
        words = self._arena.words(FIRST, layout.words)
        return [words[layout.line(one.rank) + PID] for one in self._ranks]

    def _note_message(self) -> None:
        worked = all(one.death is None and one.report is None for one in self._ranks)
        there = note_server_message(self._ranks, self._server, self._kills_before)
        self._all_ended_at_once = self._all_ended_at_once or (worked and not there)


def _receive(selector: selectors.BaseSelector, one: RankProcess) -> None:
    if not one.receive():
        selector.unregister(one.pipe)


def _settings(placement: Placement, relay: Relay | None) -> list[RankSetting]:
    """The threads, cores and outputs of each rank of a placement."""
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    settings = []
    for rank in range(placement.ranks):
        works = rank < placement.workers
        cores = placement.cores[rank] if placement.cores and works else allowed
        threads = (placement.threads or 1) if works else 1
        outputs = (1, 2) if relay is None else relay.outputs[rank]
        settings.append(RankSetting(threads, cores, outputs))
    return settings
