"""Ranks on several hosts, which mpirun starts: supervising them, and cleaning up.

end of the ranks                                     error
───────────────────────────────────────────────────  ─────────────────────────────────────────────
a rank reports an exception                          that exception
a rank makes no step for too long                    RankHung
a connection ends without a report                   PeerLost
a host is silent, or starts no rank                  HostLost
mpirun ends before all ranks have reported           LauncherLost
"""

from __future__ import annotations

import base64
import enum
import os
import pickle
import selectors
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Final, Self

from tutti.errors import HostLost, LauncherLost, OutputClosed, PeerLost, RankHung, TuttiError
from tutti.launch.exit_reports import Death, first_failure, killed_by, output_closed
from tutti.launch.hangs import HangWatch
from tutti.launch.mpi_rank import START
from tutti.launch.mpirun import EXTRA_ARGUMENTS, command_line, end_mpirun, find_mpirun, inherited, settings
from tutti.launch.placement import Placement, is_this_machine
from tutti.launch.rank_connections import PATIENT_S, QUICK_S, STACKS, STOP, RankConnections, RemoteJob
from tutti.launch.runtime_settings import start_settings
from tutti.launch.signals import SignalWatch
from tutti.launch.stop_request import StopPage, StopRequests
from tutti.launch.supervisor import Recovery, Replaced
from tutti.terminal import warn_on_stderr

FIRST_S: Final = 60.0
"""Time of mpirun to start a rank, after which another one is tried: it may hang at its start."""

LATE_S: Final = 120.0
"""Time of all ranks to begin, if the run survives the loss of a host."""

CAUSE_S: Final = 1.0
"""Time after a loss in which other ranks may report its cause, or print their stacks."""

SETTLE_S: Final = 3.0
"""Time of ranks to end after mpirun has, where their host can be reached."""

_LOOK_S: Final = 0.1


class End(enum.Enum):
    """The reasons for which a wait for ranks is over."""

    MPIRUN = "mpirun has ended"
    SIGNAL = "a signal ends everything"
    LOST = "a rank or a host is lost"
    HUNG = "a rank hangs"
    NOT_STARTED = "mpirun has started no rank in time"
    REPLACED = "others take over"


def run_on_hosts(
    entry: str,
    payload: bytes,
    placement: Placement,
    *,
    hang_timeout_s: float | None = None,
    recovery: Recovery | None = None,
) -> object:
    """Run `entry` on the hosts of the placement, as `tutti.launch.start.start` does."""
    with ExitStack() as stack:
        stopping = StopRequests(stack.enter_context(SignalWatch())) if recovery is None else recovery.stopping
        is_due = None if recovery is None else recovery.is_due
        for first_s in (FIRST_S, float("inf")):
            with RanksOnHosts(
                *(entry, payload, placement), goes_on=recovery is not None, hang_timeout_s=hang_timeout_s
            ) as ranks:
                end = ranks.wait(stopping, first_s, is_due)
            if end is not End.NOT_STARTED:
                break
            warn_on_stderr(f"mpirun has started no rank within {FIRST_S:g} s; another one is tried")
    if recovery is None:
        stopping.act()
    return None if stopping.ended_by else ranks.result()


class RanksOnHosts:
    """Ranks that mpirun starts; leaving the context ends them."""

    def __init__(
        self,
        entry: str,
        payload: bytes,
        placement: Placement,
        *,
        goes_on: bool = False,
        hang_timeout_s: float | None = None,
    ) -> None:
        self._hosts, self._goes_on = placement.hosts_with_servers, goes_on
        self._host_of = [host.name for host in self._hosts for _ in range(host.ranks)]
        self._page = StopPage()
        self._connections = RankConnections(
            placement.ranks,
            QUICK_S if goes_on else PATIENT_S,
            RemoteJob(
                entry, payload, placement.threads, list(map(str, sys.path)), sys.argv, placement.workers
            ),
            self._page,
            elsewhere=not all(is_this_machine(host.name) for host in self._hosts),
        )
        self._hangs = None if hang_timeout_s is None else HangWatch(hang_timeout_s)
        self._hung: dict[int, str] = {}
        self._deadline: float | None = None
        self._end: End | None = None
        with ExitStack() as stack:
            stack.callback(self._connections.close)
            # Ranks end when they lose the connection, and mpirun with them: a SIGKILL leaves nothing behind.
            self._process = self._launch()
            stack.callback(self._end_ranks)
            self._opened = stack.pop_all()

    def _launch(self) -> subprocess.Popen[bytes]:
        mpirun = find_mpirun()
        started = start_settings(os.environ)
        environment = {
            **inherited(),
            **settings(mpirun, self._hosts, os.environ),
            **started,
            START: base64.urlsafe_b64encode(pickle.dumps(self._connections.address)).decode(),
        }
        exported = [
            name for name in environment if name.startswith("TUTTI_") or name in ("PYTHONPATH", *started)
        ]
        extra = shlex.split(os.environ.get(EXTRA_ARGUMENTS, ""))
        return subprocess.Popen(
            command_line(mpirun, self._hosts, exported, extra),
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def wait(self, stopping: StopRequests, first_s: float, is_due: Callable[[], bool] | None) -> End:
        """Wait until the ranks have ended, or must be ended."""
        self._page.on_request = lambda: self._connections.send(STOP)
        stopping.pass_to(self._page)
        self._began = time.monotonic()
        with selectors.DefaultSelector() as selector, open(os.pidfd_open(self._process.pid)) as ended:
            for one in (stopping, ended, self._connections):
                selector.register(one, selectors.EVENT_READ)
            while self._end is None:
                selector.select(_LOOK_S)
                self._connections.look()
                if stopping.over():
                    self._end = End.SIGNAL
                elif self._process.poll() is not None:
                    self._end = End.MPIRUN
                elif is_due is not None and is_due():
                    self._end = End.REPLACED
                else:
                    self._end = self._look(time.monotonic(), first_s)
        if self._end is End.MPIRUN:
            self._connections.settle(SETTLE_S)
        return self._end

    def _look(self, now: float, first_s: float) -> End | None:
        """Return why the ranks must be ended; None: they need not."""
        ranks, passed_s = self._connections.ranks.values(), now - self._began
        if not ranks and passed_s > first_s:
            return End.NOT_STARTED
        if self._goes_on and passed_s > LATE_S and not self._connections.complete:
            return End.LOST
        if any(one.silent for one in ranks):
            return End.LOST
        if self._deadline is None and any(one.ended_at is not None and one.report is None for one in ranks):
            self._deadline = now + CAUSE_S
        if self._hangs is not None and self._deadline is None:
            statuses = {one.rank: one.status for one in self._connections.left if one.status is not None}
            self._hung = self._hangs.look(statuses, now)
            if self._hung:  # They print their stacks until then.
                self._connections.send(STACKS, self._hung)
                self._deadline = now + CAUSE_S
            for rank, warning in self._hangs.silent(statuses, now).items():
                warn_on_stderr(warning)
                self._connections.send(STACKS, [rank])
        if self._deadline is None or now < self._deadline:
            return None
        return End.HUNG if self._hung else End.LOST

    def _end_ranks(self) -> None:
        # Ranks of all hosts end at once, even if mpirun hangs.
        self._connections.close()
        end_mpirun(self._process, at_once=self._end not in (End.MPIRUN, End.SIGNAL))
        for one in self._connections.ranks.values():
            for segment in one.segments:
                if is_this_machine(self._host_of[one.rank]):
                    Path(segment).unlink(missing_ok=True)

    def result(self) -> object:
        """Return the result of rank 0, or raise the job's error."""
        if self._end is End.REPLACED:
            raise Replaced
        if self._end is End.HUNG:
            why = next(iter(self._hung.values()))
            raise RankHung(self._hung, f"on {', '.join(self._hosts_of(self._hung))}: {why}")
        error = self._failure()
        if error is not None:
            raise error
        report = self._connections.ranks[0].report
        assert report is not None, "all ranks have reported"
        assert report.value is not None, "rank 0 has a result"
        return pickle.loads(report.value)

    def _failure(self) -> TuttiError | None:
        ranks = self._connections.ranks
        reports = [one.report for one in ranks.values() if one.report is not None]
        error, _ = first_failure(reports, self._first_death())
        if error is not None and not isinstance(error, PeerLost):
            return error
        returncode = self._process.returncode
        if self._end is End.MPIRUN and returncode < 0:
            return LauncherLost(f"mpirun, which had started the ranks, was {killed_by(-returncode)}")
        return self._lost_host() or error or self._launcher_failure(len(reports), returncode)

    def _lost_host(self) -> HostLost | None:
        """Return the lost hosts: silent ones, or hosts without a rank."""
        ranks = self._connections.ranks
        # Where mpirun has ended, so have the ranks of all hosts that it reached.
        left = [one.rank for one in self._connections.left if one.report is None]
        silent = [one.rank for one in ranks.values() if one.silent] or left * (self._end is End.MPIRUN)
        if silent:
            return HostLost(self._hosts_of(silent), silent, "it cannot be reached any more")
        missing = [rank for rank in range(len(self._host_of)) if rank not in ranks]
        if self._end is End.LOST and missing:
            why = f"no rank of it has begun within {LATE_S:g} s"
            return HostLost(self._hosts_of(missing), missing, why)
        return None

    def _launcher_failure(self, reported: int, returncode: int) -> TuttiError | None:
        if returncode == 0 and reported == len(self._host_of):
            return None
        if output_closed():
            return OutputClosed("the reader of standard output has gone")
        return LauncherLost(
            f"mpirun ended with exit code {returncode}; see its output above. "
            "Try the hosts with: mpirun --host HOST:1 hostname; and look for room with: df /tmp"
        )

    def _first_death(self) -> list[Death]:
        """Return the first death: others may be consequences of it."""
        deaths = [
            Death(one.rank, one.ended_at, None)
            for one in self._connections.ranks.values()
            if one.ended_at is not None and one.report is None and not one.silent
        ]
        return sorted(deaths, key=lambda death: death.at)[:1]

    def _hosts_of(self, ranks: Iterable[int]) -> list[str]:
        return list(dict.fromkeys(self._host_of[rank] for rank in ranks))
