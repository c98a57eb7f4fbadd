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
from typing import Final, cast

from tutti.comm.shm.arena import Arena
from tutti.errors import PeerLost, TuttiError
from tutti.launch.exit_reports import Report, cause
from tutti.launch.fork_server_client import RankGroup
from tutti.launch.hangs import LOOK_S, HangWatch, HostSigns
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


@dataclass(frozen=True)
class Outcome:
    """The end of a crew's work.

    Attributes:
        error: the failure that came first; None: rank 0 has reported a result.
    """

    error: TuttiError | None


class Crew:
    """The ranks, from their start on.

    Args:
        server: forks them.
        entry: the function that each calls, as "package.module:function".
        payload: handed to the entry.
        placement: of the ranks.
        stop: the file of their `StopPage`.
        relay: takes what they print.
        hang_timeout_s: the time in which each has to make a step; None: any.
    """

    def __init__(
        self,
        server: RankGroup,
        entry: str,
        payload: bytes,
        placement: Placement,
        stop: int,
        relay: Relay | None = None,
        hang_timeout_s: float | None = None,
    ) -> None:
        self._server = server
        self._kills_before = out_of_memory_kills()
        self._deadline: float | None = None
        self._all_ended_at_once = False
        with ExitStack() as stack:
            arena = stack.enter_context(closing(Arena.create()))
            settings = _settings(placement, relay)
            self._ranks = start_ranks(stack, server, entry, payload, settings, stop, arena)
            self._signs = HostSigns(arena, len(self._ranks))
            self._hangs = None if hang_timeout_s is None else HangWatch(hang_timeout_s)
            self._opened = stack.pop_all()

    def register(self, selector: selectors.BaseSelector) -> None:
        """Have a selector wait for what comes of them; the data of its keys are to be called then."""
        selector.register(self._server.control, selectors.EVENT_READ, self._note_message)
        for one in self._ranks:
            selector.register(one.pipe, selectors.EVENT_READ, partial(_receive, selector, one))

    def patience_s(self) -> float | None:
        """Time to wait for events before `outcome` is to be asked again; None: until there is one."""
        limits = [] if self._hangs is None else [LOOK_S]
        if self._deadline is not None:
            limits.append(max(0.0, self._deadline - time.monotonic()))
        return min(limits, default=None)

    def outcome(self) -> Outcome | None:
        """Return how its work has ended; None: it goes on. Ranks that hang are killed."""
        if self._hangs is not None:
            self._end_hung(self._hangs)
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

    def _end_hung(self, watch: HangWatch) -> None:
        """Kill the ranks that hang, unless that was done. Their deaths end the job."""
        if any(one.hung for one in self._ranks):
            return
        now = time.monotonic()
        signs = self._signs.read([one.rank for one in self._ranks if not one.ended], now)
        hung = watch.look(signs, now)
        for rank, why in hung.items():
            self._ranks[rank].hung = why
        if hung:
            self._signs.kill(hung)

    @property
    def result(self) -> bytes:
        """The pickled result of rank 0, which has reported it."""
        return cast("bytes", cast("Report", self._ranks[0].report).value)

    def close(self) -> None:
        """Give up the pipes and the arena."""
        self._opened.close()

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
