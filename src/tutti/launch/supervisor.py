"""The supervisor: has the ranks of one machine started, waits for them, and leaves none behind. No torch.

The first failure of a rank ends all other ranks, and the caller gets it: see `tutti.launch.recovery`.
"""

from __future__ import annotations

import os
import pickle
import selectors
from collections.abc import Callable
from contextlib import ExitStack, closing

from tutti.errors import PeerLost, TuttiError
from tutti.launch.crew import Crew
from tutti.launch.fork_server_client import fork_server
from tutti.launch.output_relay import Relay
from tutti.launch.placement import Placement
from tutti.launch.recovery import DUE_S, Recovery, Replaced
from tutti.launch.signals import SignalWatch
from tutti.launch.stop_request import StopPage, Stopping


def supervise(
    entry: str,
    payload: bytes,
    placement: Placement,
    *,
    prefix: bool = False,
    hang_timeout_s: float | None = None,
    recovery: Recovery | None = None,
) -> object:
    """Run `entry` on the ranks of the placement, on this machine, as `tutti.launch.start.start` says."""
    with ExitStack() as watch:
        # It lasts longer than the ranks: a second Ctrl-C does not interrupt the clean-up after the first.
        stopping = Stopping(watch.enter_context(SignalWatch())) if recovery is None else recovery.stopping
        stop = StopPage.make_file()
        page = StopPage(stop)
        stopping.pass_to(page, None)
        threads, crowded = placement.threads or 1, bool(placement.warnings)
        if recovery is not None:
            threads, crowded = recovery.threads, recovery.crowded
        with ExitStack() as stack:
            stack.callback(os.close, stop)
            relay = stack.enter_context(Relay(placement.ranks)) if prefix else None
            # Left first: when nobody writes any more.
            server = stack.enter_context(fork_server(threads, crowded))
            # Before the server ends what is left of them.
            stack.callback(page.end)
            crew = stack.enter_context(
                closing(Crew(server, entry, payload, placement, stop, relay, hang_timeout_s))
            )
            if relay is not None:
                relay.start()
            error = _wait(crew, stopping, None if recovery is None else recovery.is_due)
            if recovery is not None and isinstance(error, PeerLost | Replaced):
                server.clear(0.0)  # Others wait for the cores of those that are left.
    if recovery is None:
        stopping.act()
    if error is not None:
        raise error
    return None if stopping.ended_by else pickle.loads(crew.result)


def _wait(crew: Crew, stopping: Stopping, is_due: Callable[[], bool] | None) -> TuttiError | Replaced | None:
    """Wait until all ranks are done (None), one has failed (the error), or a signal ends them (None)."""
    with selectors.DefaultSelector() as selector:
        selector.register(stopping, selectors.EVENT_READ, lambda: None)
        crew.register(selector)
        look_s = None if is_due is None else DUE_S
        while not stopping.over():
            limits = [limit for limit in (crew.patience_s(), look_s) if limit is not None]
            for key, _ in selector.select(min(limits, default=None)):
                key.data()
            if (outcome := crew.outcome()) is not None:
                return outcome.error
            if is_due is not None and is_due():
                return Replaced()
    return None
