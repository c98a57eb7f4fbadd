"""The supervisor: has the ranks of one machine started, waits for them, and leaves none behind. No torch.

A rank ends in one of three ways: it reports that it is done, it reports an exception, or it dies without a
report (which the fork server, its parent, sees at once). The first failure ends all other ranks, and the
caller gets it.

    supervisor ◀── RankEnded ── fork server
               ◀── report ───── rank 0 ┐
               ◀── report ───── rank 1 ├─ one anonymous file: the arena
               ◀── report ───── rank 2 ┘
"""

from __future__ import annotations

import math
import os
import pickle
import selectors
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Final, cast

from tutti.comm.shm.arena import FIRST, Arena
from tutti.comm.shm.layout import PID, ControlLayout
from tutti.errors import PeerLost, TuttiError
from tutti.launch.exit_reports import Report, cause
from tutti.launch.fork_server_client import ForkServer, fork_server
from tutti.launch.hangs import LOOK_S, HangWatch
from tutti.launch.output_relay import Relay
from tutti.launch.placement import Placement
from tutti.launch.rank_processes import (
    RankProcess,
    RankSetting,
    is_being_killed,
    note_server_message,
    out_of_memory_kills,
    start_ranks,
)
from tutti.launch.signals import SignalWatch
from tutti.launch.stop_request import StopPage, Stopping

CAUSE_S: Final = 1.0
"""The wait for the cause, after a rank has reported that it lost a peer."""

TOGETHER_S: Final = 0.5
"""Time of a rank that a signal is killing to be gone, when another one has been lost."""

FINISH_S: Final = 10.0
"""Time of a rank that is done to exit."""


def supervise(
    entry: str,
    payload: bytes,
    placement: Placement,
    *,
    prefix: bool = False,
    hang_timeout_s: float | None = None,
) -> object:
    """Run `entry` on the ranks of the placement, on this machine, as `tutti.launch.start.start` says."""
    # The watch lasts longer than the ranks: a second Ctrl-C does not interrupt the clean-up after the first.
    with SignalWatch() as signals:
        stop = StopPage.make_file()
        page = StopPage(stop)
        stopping = Stopping(signals, page)
        with ExitStack() as stack:
            stack.callback(os.close, stop)
            relay = stack.enter_context(Relay(placement.ranks)) if prefix else None
            # Left first: when nobody writes any more.
            server = stack.enter_context(
                fork_server(placement.threads or 1, crowded=bool(placement.warnings))
            )
            # Before the server ends what is left of them.
            stack.callback(page.end)
            arena = stack.enter_context(closing(Arena.create()))
            settings = _settings(placement, relay)
            ranks = start_ranks(stack, server, entry, payload, settings, stop, arena)
            hangs = None if hang_timeout_s is None else HangWatch(arena, ranks, hang_timeout_s)
            if relay is not None:
                relay.start()
            error = _watch(ranks, server, stopping, hangs, arena)
    stopping.act()
    if error is not None:
        raise error
    done = cast("Report", ranks[0].report)
    return pickle.loads(cast("bytes", done.value))


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


def _watch(
    ranks: Sequence[RankProcess],
    server: ForkServer,
    stopping: Stopping,
    hangs: HangWatch | None,
    arena: Arena,
) -> TuttiError | None:
    """Wait until all ranks are done (None), one has failed (the error), or a signal ends them (None)."""
    kills_before = out_of_memory_kills()
    deadline: float | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(stopping, selectors.EVENT_READ)
        selector.register(server.control, selectors.EVENT_READ, server)
        for one in ranks:
            selector.register(one.pipe, selectors.EVENT_READ, one)
        while not stopping.over():
            patience = None if deadline is None else max(0.0, deadline - time.monotonic())
            look = None if hangs is None else LOOK_S
            limits = [limit for limit in (patience, stopping.patience_s(), look) if limit is not None]
            for key, _ in selector.select(min(limits, default=None)):
                if key.data is server:
                    note_server_message(ranks, server, kills_before)
                elif key.data is not None and not key.data.receive():
                    selector.unregister(key.fileobj)
            if hangs is not None:
                hangs.look(time.monotonic())
            deaths = [one.death for one in ranks if one.death]
            error, certain = cause([one.report for one in ranks if one.report], deaths)
            if certain:
                if not isinstance(error, PeerLost) or not _are_dying(ranks, arena):
                    return error
                # It is lost as well, and is to be named.
                deadline = min(deadline or math.inf, max(death.at for death in deaths) + TOGETHER_S)
            elif error is not None:
                deadline = deadline or time.monotonic() + CAUSE_S
            elif all(one.report for one in ranks):
                # They may have threads and children to end.
                deadline = deadline or time.monotonic() + FINISH_S
            over = deadline is not None and time.monotonic() >= deadline
            if over or all(one.ended for one in ranks):
                return error
    return None


def _are_dying(ranks: Sequence[RankProcess], arena: Arena) -> bool:
    """Tell whether ranks are about to be known as ended: to die of a signal takes milliseconds."""
    layout = ControlLayout(len(ranks))
    words = arena.words(FIRST, layout.words)
    return any(is_being_killed(words[layout.line(one.rank) + PID]) for one in ranks if not one.ended)
