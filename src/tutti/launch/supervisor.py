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

import os
import pickle
import selectors
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Final, cast

from tutti.comm.shm.arena import Arena
from tutti.comm.shm.layout import control_bytes
from tutti.errors import TuttiError
from tutti.launch.exit_reports import Death, Report, cause, decode
from tutti.launch.fork_server import RankEnded
from tutti.launch.fork_server_client import ForkServer, fork_server
from tutti.launch.output_relay import Relay
from tutti.launch.placement import Placement
from tutti.launch.rank_main import Descriptors, RankJob, RankPlace
from tutti.launch.signals import SignalWatch
from tutti.launch.stop_request import StopPage, Stopping

CAUSE_S: Final = 1.0
"""The wait for the cause, after a rank has reported that it lost a peer."""

FINISH_S: Final = 10.0
"""How long a rank that is done may take to exit."""


@dataclass
class RankProcess:
    """The supervisor's record of a rank: what has come through its pipe, and how it has ended."""

    rank: int
    pipe: FileIO
    received: bytearray = field(default_factory=bytearray)
    report: Report | None = None
    death: Death | None = None
    ended: bool = False

    def receive(self) -> bool:
        """Read all that is in the pipe; returns whether more may come."""
        while data := self.pipe.read(1 << 20):
            self.received += data
            if self.report is None:
                self.report = next(iter(cast("list[Report]", decode(self.received))), None)
        return data is None

    def end(self, returncode: int, starved: bool) -> None:
        """Record that the process has ended."""
        self.ended = True
        # It may have written its report after the last read and before its end: read once more.
        self.receive()
        if self.report is None:
            self.death = Death(self.rank, time.monotonic(), returncode, starved)


def supervise(entry: str, payload: bytes, placement: Placement, *, prefix: bool = False) -> object:
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
            ranks = _start_ranks(stack, server, entry, payload, placement, stop, relay)
            error = _watch(ranks, server, stopping)
    stopping.act()
    if error is not None:
        raise error
    done = cast("Report", ranks[0].report)
    return pickle.loads(cast("bytes", done.value))


def _start_ranks(
    stack: ExitStack,
    server: ForkServer,
    entry: str,
    payload: bytes,
    placement: Placement,
    stop: int,
    relay: Relay | None,
) -> list[RankProcess]:
    """Start them; `stack` closes the pipes of their reports, `stop` is the file of the `StopPage`."""
    ranks: list[RankProcess] = []
    arena = Arena.create()
    block = arena.allocate(control_bytes(placement.ranks))
    content = os.memfd_create("tutti-job", os.MFD_CLOEXEC)
    allowed = tuple(sorted(os.sched_getaffinity(0)))
    try:
        with open(content, "wb", closefd=False) as file:
            path = [str(folder) for folder in sys.path]
            pickle.dump(RankJob(payload, path, sys.argv, _folder()), file)
        for rank in range(placement.ranks):
            works = rank < placement.workers
            cores = placement.cores[rank] if placement.cores and works else allowed
            threads = (placement.threads or 1) if works else 1
            reading, writing = os.pipe2(os.O_CLOEXEC)
            os.set_blocking(reading, False)
            ranks.append(RankProcess(rank, stack.enter_context(FileIO(reading))))
            outputs = (1, 2) if relay is None else relay.outputs[rank]
            try:
                server.fork(
                    RankPlace(rank, placement.ranks, entry, block, threads, cores),
                    Descriptors(arena.fd, content, writing, stop, *outputs),
                )
            finally:
                os.close(writing)
    finally:
        arena.close()
        os.close(content)
    if relay is not None:
        relay.start()
    return ranks


def _folder() -> str:
    """The working directory; nothing if somebody has deleted it."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _watch(ranks: Sequence[RankProcess], server: ForkServer, stopping: Stopping) -> TuttiError | None:
    """Wait until all ranks are done (None), one has failed (the error), or a signal ends them (None)."""
    kills_before = _out_of_memory_kills()
    deadline: float | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(stopping, selectors.EVENT_READ)
        selector.register(server.control, selectors.EVENT_READ, server)
        for one in ranks:
            selector.register(one.pipe, selectors.EVENT_READ, one)
        while not stopping.over():
            patience = None if deadline is None else max(0.0, deadline - time.monotonic())
            limits = [limit for limit in (patience, stopping.patience_s()) if limit is not None]
            for key, _ in selector.select(min(limits, default=None)):
                if key.data is server:
                    _handle_server_message(ranks, server, kills_before)
                elif key.data is not None and not key.data.receive():
                    selector.unregister(key.fileobj)
            error, certain = cause(
                [one.report for one in ranks if one.report], [one.death for one in ranks if one.death]
            )
            if certain:
                return error
            if error is not None:
                deadline = deadline or time.monotonic() + CAUSE_S
            elif all(one.report for one in ranks):
                # They may have threads and children to end.
                deadline = deadline or time.monotonic() + FINISH_S
            over = deadline is not None and time.monotonic() >= deadline
            if over or all(one.ended for one in ranks):
                return error
    return None


def _handle_server_message(ranks: Sequence[RankProcess], server: ForkServer, kills_before: int) -> None:
    """Record which rank has ended; if the fork server is gone, all have."""
    message = server.next_message()
    if isinstance(message, RankEnded):
        killed = message.returncode == -signal.SIGKILL
        ranks[message.rank].end(message.returncode, killed and _out_of_memory_kills() > kills_before)
    elif message is None:
        returncode = server.returncode()
        for one in ranks:
            one.end(returncode, starved=_out_of_memory_kills() > kills_before)


def _out_of_memory_kills() -> int:
    """Return the number of processes that the kernel has killed for lack of memory since it started."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
