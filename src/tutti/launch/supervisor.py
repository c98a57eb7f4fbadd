"""The supervisor: starts the ranks of one machine, waits for them, and leaves none behind. No torch.

A rank ends in one of three ways: it reports that it is done, it reports an exception, or it dies without a
report (which the fork server, its parent, sees at once). The first failure ends all other ranks.

    supervisor ◀── RankEnded ── fork server
               ◀── report ───── rank 0 ┐
               ◀── report ───── rank 1 ├─ one anonymous file: the arena
               ◀── report ───── rank 2 ┘
"""

from __future__ import annotations

import os
import pickle
import selectors
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Final, cast

from tutti.comm.shm.arena import Arena
from tutti.errors import PeerLost, TuttiError
from tutti.launch.exit_reports import first_failure
from tutti.launch.fork_server_client import RankGroup, fork_server
from tutti.launch.hangs import LOOK_S, STACKS, HangWatch, HostStatus
from tutti.launch.placement import Placement
from tutti.launch.rank_main import RankSetting
from tutti.launch.rank_processes import RankProcess, note_server_message, start_ranks
from tutti.launch.signals import SignalWatch
from tutti.launch.stop_request import StopPage, StopRequests
from tutti.terminal import IMPORTING, wait_shown, warn_on_stderr

DUE_S: Final = 0.1
"""Time between two calls of `Recovery.is_due`."""

CAUSE_S: Final = 1.0
"""The wait for the cause, after a rank has reported that it lost a peer."""

TOGETHER_S: Final = 0.1
"""Time after a death in which other ranks are lost together with the first one."""

FINISH_S: Final = 10.0
"""Time of a rank that is done to exit."""


class Replaced(Exception):
    """The ranks were ended because others take over."""


@dataclass(frozen=True)
class Recovery:
    """The caller's side of all starts of a job that survives the loss of a rank."""

    stopping: StopRequests  # receives the signals of all starts; the caller acts on the last one
    is_due: Callable[[], bool]  # called every `DUE_S`; returns whether to end the ranks, by `Replaced`


def supervise(
    entry: str,
    payload: bytes,
    placement: Placement,
    *,
    hang_timeout_s: float | None = None,
    recovery: Recovery | None = None,
) -> object:
    """Run `entry` on the ranks of the placement, on this machine, as `tutti.launch.start.start` does."""
    with ExitStack() as watch:
        # It lasts longer than the ranks: a second Ctrl-C does not interrupt the clean-up after the first.
        stopping = StopRequests(watch.enter_context(SignalWatch())) if recovery is None else recovery.stopping
        stop = StopPage.make_file()
        page = StopPage(stop)
        stopping.pass_to(page)
        with ExitStack() as stack:
            stack.callback(os.close, stop)
            server = stack.enter_context(fork_server())
            settings = _settings(placement)
            supervisor = stack.enter_context(
                closing(Supervisor(server, entry, payload, settings, stop, hang_timeout_s))
            )
            end = supervisor.wait(stopping, None if recovery is None else recovery.is_due)
            if recovery is not None and isinstance(end, PeerLost | Replaced):
                server.clear(0.0)  # New ranks wait for the cores of the old ones.
    if recovery is None:
        stopping.act()
    if isinstance(end, Exception):
        raise end
    return None if end is None else pickle.loads(end)


class Supervisor:
    """The ranks, from their start on."""

    def __init__(
        self,
        server: RankGroup,
        entry: str,
        payload: bytes,
        settings: list[RankSetting],
        stop: int,
        hang_timeout_s: float | None = None,
    ) -> None:
        self._server = server
        self._deadline: float | None = None
        self._all_ended_at_once = False
        self._starting = ExitStack()
        with ExitStack() as stack:
            arena = stack.enter_context(closing(Arena.create()))
            self._ranks = start_ranks(stack, server, entry, payload, settings, stop, arena)
            self._status = HostStatus(arena, len(self._ranks))
            self._hangs = None if hang_timeout_s is None else HangWatch(hang_timeout_s)
            self._opened = stack.pop_all()

    def wait(
        self, stopping: StopRequests, is_due: Callable[[], bool] | None = None
    ) -> bytes | TuttiError | Replaced | None:
        """Return rank 0's pickled result, or the failure that came first; None: a signal ends the ranks."""
        with self._starting, selectors.DefaultSelector() as selector:
            if not self._server.ready:
                self._starting.enter_context(wait_shown(IMPORTING))
            selector.register(stopping, selectors.EVENT_READ, lambda: None)
            selector.register(self._server.control, selectors.EVENT_READ, self._note_message)
            for one in self._ranks:
                selector.register(one.pipe, selectors.EVENT_READ, partial(_receive, selector, one))
            while not stopping.over():
                for key, _ in selector.select(self._patience_s(is_due is not None)):
                    key.data()
                if self._hangs is not None:
                    self._end_hung(self._hangs)
                if (end := self._end()) is not None:
                    return end
                if is_due is not None and is_due():
                    return Replaced()
        return None

    def close(self) -> None:
        """Release the pipes and the arena."""
        self._opened.close()

    def _patience_s(self, recovers: bool) -> float | None:
        limits = [LOOK_S] * (self._hangs is not None) + [DUE_S] * recovers
        if self._deadline is not None:
            limits.append(max(0.0, self._deadline - time.monotonic()))
        return min(limits, default=None)

    def _end(self) -> bytes | TuttiError | None:
        """Return the end of the work; None: it is not over."""
        reports = [one.report for one in self._ranks if one.report]
        deaths = [one.death for one in self._ranks if one.death]
        error, certain = first_failure(reports, deaths)
        if certain:
            if self._all_ended_at_once:
                return PeerLost([], f"the process that forked all ranks ended: {deaths[0].why()}")
            if not deaths:
                return error
            self._deadline = min(death.at for death in deaths) + TOGETHER_S
        elif error is not None:
            self._deadline = self._deadline or time.monotonic() + CAUSE_S
        elif len(reports) == len(self._ranks):
            # They may have threads and children to end.
            self._deadline = self._deadline or time.monotonic() + FINISH_S
        over = self._deadline is not None and time.monotonic() >= self._deadline
        if not over and not all(one.ended for one in self._ranks):
            return None
        return error or cast("bytes", reports[0].value)

    def _end_hung(self, watch: HangWatch) -> None:
        """Kill the ranks that hang, once. Their deaths end the job."""
        if any(one.hung for one in self._ranks):
            return
        now = time.monotonic()
        statuses = self._status.read([one.rank for one in self._ranks if not one.ended], now)
        hung = watch.look(statuses, now)
        for rank, why in hung.items():
            self._ranks[rank].hung = why
        if hung:
            self._status.kill(hung)
            return
        for rank, warning in watch.silent(statuses, now).items():
            warn_on_stderr(warning)
            self._status.signal([rank], STACKS)

    def _note_message(self) -> None:
        worked = all(one.death is None and one.report is None for one in self._ranks)
        there = note_server_message(self._ranks, self._server)
        self._starting.close()
        self._all_ended_at_once = self._all_ended_at_once or (worked and not there)


def _receive(selector: selectors.BaseSelector, one: RankProcess) -> None:
    if not one.receive():
        selector.unregister(one.pipe)


def _settings(placement: Placement) -> list[RankSetting]:
    """Return the setting of each rank of a placement."""
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    settings = []
    for rank in range(placement.ranks):
        works = rank < placement.workers
        cores = placement.cores[rank] if placement.cores and works else allowed
        threads = (placement.threads or 1) if works else 1
        settings.append(RankSetting(threads, cores))
    return settings
