"""The supervisor: has the ranks of one machine started, waits for them, and leaves none behind. No torch.

The first failure of a rank ends all other ranks, and the caller gets it; unless others take their place.
"""

from __future__ import annotations

import os
import pickle
import selectors
from contextlib import ExitStack, closing

from tutti.errors import TuttiError
from tutti.launch.crew import Crew, Orders
from tutti.launch.fork_server_client import fork_server
from tutti.launch.output_relay import Relay
from tutti.launch.placement import Placement
from tutti.launch.signals import SignalWatch
from tutti.launch.stop_request import StopPage, Stopping
from tutti.launch.succession import Line, Succession


def supervise(
    entry: str,
    payload: bytes,
    placement: Placement,
    *,
    prefix: bool = False,
    hang_timeout_s: float | None = None,
    succession: Succession | None = None,
) -> object:
    """Run `entry` on the ranks of the placement, on this machine, as `tutti.launch.start.start` says."""
    orders = Orders(payload, placement)
    # The watch lasts longer than the ranks: a second Ctrl-C does not interrupt the clean-up after the first.
    with SignalWatch() as signals:
        stop = StopPage.make_file()
        page = StopPage(stop)
        stopping = Stopping(signals, page)
        with ExitStack() as stack:
            stack.callback(os.close, stop)
            if succession is not None:
                line = stack.enter_context(closing(Line(entry, stop, succession, hang_timeout_s)))
                stack.callback(page.end)
                crew, error = line.follow(orders, stopping)
            else:
                relay = stack.enter_context(Relay(placement.ranks)) if prefix else None
                # Left first: when nobody writes any more.
                server = stack.enter_context(
                    fork_server(placement.threads or 1, crowded=bool(placement.warnings))
                )
                # Before the server ends what is left of them.
                stack.callback(page.end)
                crew = stack.enter_context(closing(Crew(server, entry, orders, stop, relay, hang_timeout_s)))
                if relay is not None:
                    relay.start()
                error = _wait(crew, stopping)
    stopping.act()
    if error is not None:
        raise error
    return pickle.loads(crew.result)


def _wait(crew: Crew, stopping: Stopping) -> TuttiError | None:
    """Wait until all ranks are done (None), one has failed (the error), or a signal ends them (None)."""
    with selectors.DefaultSelector() as selector:
        selector.register(stopping, selectors.EVENT_READ, lambda: None)
        crew.register(selector)
        while not stopping.over():
            limits = [limit for limit in (stopping.patience_s(), crew.patience_s()) if limit is not None]
            for key, _ in selector.select(min(limits, default=None)):
                key.data()
            if (outcome := crew.outcome()) is not None:
                return outcome.error
    return None
