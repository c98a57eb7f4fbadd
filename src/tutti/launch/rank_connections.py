"""Connections between the launching process and the ranks that mpirun starts, on any host. Needs no torch.

    launching process ──┬── rank 0      ── RemoteJob, STOP, STACKS ──►
                        ├── rank 1      ◄── its number, Started, RankStatus, Stoppable, Report ──
                        └── rank 2

A rank that ends closes its connection, however it ends. A host without power or network closes none: so
the kernels probe each other every second. (MPI's own launcher notices that after minutes, and may call it a
success.)
Both sides prove that they know the key of the run before anything is unpickled.
"""

from __future__ import annotations

import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Final, cast

from tutti.launch.exit_reports import Report
from tutti.launch.hangs import RankStatus, print_stacks
from tutti.launch.placement import own_addresses
from tutti.launch.stop_request import StopPage

QUICK_S: Final = 3
"""Seconds of silence after which a host is lost, if the run survives that."""

PATIENT_S: Final = 30
"""The same if the run ends with it: a switch that restarts may be silent for this time."""

STATUS_S: Final = 1.0
"""Time between two messages of a rank about its status."""

STOP: Final = "stop"
"""Asks a rank to save and stop."""

STACKS: Final = "stacks"
"""Asks a rank for the stacks of its threads."""

_STRANGER_S: Final = 2.0
"""Time of a connection to prove that it is one of a rank."""

_GREETING_S: Final = 20.0
_CONNECT_S: Final = 2.0


@dataclass(frozen=True)
class LauncherAddress:
    """The address of the launching process."""

    hosts: tuple[str, ...]  # its IPv4 addresses, to be tried in this order
    port: int
    key: bytes  # of the run
    silence_s: int  # after this silence the other side is gone


@dataclass(frozen=True)
class RemoteJob:
    """The job of the ranks."""

    entry: str  # the function to run, as "package.module:function"
    payload: bytes  # its argument; only rank 0 is sent one
    threads: int | None  # of each worker; None: its share of its host's cores
    path: list[str]  # `sys.path` of the launching process
    arguments: list[str]  # its `sys.argv`
    workers: int  # the ranks after them are servers


@dataclass(frozen=True)
class Started:
    """MPI has started in a rank, and made these files in /dev/shm."""

    segments: tuple[str, ...]


@dataclass(frozen=True)
class Stoppable:
    """Rank 0 looks for requests to stop from now on, or stops looking."""

    value: bool


@dataclass
class RemoteRank:
    """The launching process's record of a rank that has connected."""

    rank: int
    connection: Connection
    status: RankStatus | None = None  # the last one
    report: Report | None = None
    segments: tuple[str, ...] = ()  # the files in /dev/shm that MPI made for it
    ended_at: float | None = None  # the end of its connection, by the monotonic clock
    silent: bool = False  # its host has stopped answering


class RankConnections:
    """The launching process's side."""

    def __init__(
        self, size: int, silence_s: int, given: RemoteJob, page: StopPage, *, elsewhere: bool
    ) -> None:
        self._size, self._job, self._page = size, given, page
        self._listener = socket.create_server(("" if elsewhere else "127.0.0.1", 0), backlog=max(128, size))
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        hosts = own_addresses() if elsewhere else ("127.0.0.1",)
        self.address = LauncherAddress(hosts, self._listener.getsockname()[1], os.urandom(32), silence_s)
        self.ranks: dict[int, RemoteRank] = {}

    @property
    def complete(self) -> bool:
        """True if all ranks have connected."""
        return len(self.ranks) == self._size

    @property
    def left(self) -> list[RemoteRank]:
        """The ranks whose connections have not ended."""
        return [one for one in self.ranks.values() if one.ended_at is None]

    def fileno(self) -> int:
        """Return a descriptor that is readable when a message waits."""
        return self._selector.fileno()

    def look(self, timeout_s: float = 0.0) -> None:
        """Receive the waiting messages."""
        for key, _ in self._selector.select(timeout_s):
            if key.fileobj is self._listener:
                self._greet(self._listener.accept()[0])
            else:
                self._read(key.data)

    def settle(self, seconds: float) -> None:
        """Wait, for a time, until the connections of all ranks have ended."""
        deadline = time.monotonic() + seconds
        while self.left and (rest := deadline - time.monotonic()) > 0:
            self.look(rest)

    def send(self, message: str, ranks: Iterable[int] | None = None) -> None:
        """Send a message to some ranks, by default to all."""
        for one in self.left:
            if ranks is None or one.rank in ranks:
                with suppress(OSError):  # Its end is noticed later.
                    one.connection.send(message)

    def close(self) -> None:
        """Close all connections, which ends the ranks."""
        for one in self.left:
            one.connection.close()
        self._listener.close()
        self._selector.close()

    def _greet(self, connected: socket.socket) -> None:
        _limit_reading(connected, _STRANGER_S)
        _probe_often(connected, self.address.silence_s)
        connection = Connection(connected.detach())
        try:
            deliver_challenge(connection, self.address.key)
            answer_challenge(connection, self.address.key)
            rank = cast("int", connection.recv())
            connection.send(self._job if rank == 0 else replace(self._job, payload=b""))
            if self._page.requested:
                connection.send(STOP)
        except (OSError, EOFError, AuthenticationError):  # It was not a rank, or the rank has ended.
            connection.close()
            return
        self.ranks[rank] = one = RemoteRank(rank, connection)
        self._selector.register(connection, selectors.EVENT_READ, one)

    def _read(self, one: RemoteRank) -> None:
        try:
            while one.connection.poll():
                self._take(one, one.connection.recv())
        except (EOFError, OSError) as error:
            one.ended_at = time.monotonic()
            one.silent = not isinstance(error, EOFError | ConnectionError)
            self._selector.unregister(one.connection)
            one.connection.close()

    def _take(self, one: RemoteRank, message: object) -> None:
        # The clocks of other hosts are not this one's: the time of arrival counts.
        now = time.monotonic()
        if isinstance(message, RankStatus):
            one.status = replace(message, at=now)
        elif isinstance(message, Report):
            one.report = replace(message, at=now)
        elif isinstance(message, Started):
            one.segments = message.segments
        else:
            self._page.stoppable = cast("Stoppable", message).value


class LauncherConnection:
    """The side of a rank."""

    def __init__(self, connection: Connection, received: RemoteJob) -> None:
        self._connection, self.job = connection, received
        self._lock, self._leaves = threading.Lock(), False
        # Returns the word STEPS of this rank, and whether it waits; None: MPI has not started.
        self.status: Callable[[], tuple[int, bool]] | None = None

    def send(self, message: Started | Stoppable | RankStatus) -> None:
        """Send a message; `watch` notices if the other side is gone."""
        with self._lock, suppress(OSError):
            self._connection.send(message)

    def leave(self, report: Report) -> None:
        """Send the report of this rank, which ends now."""
        with self._lock, suppress(OSError):
            self._leaves = True
            self._connection.send(report)

    def watch(self, page: StopPage, end: Callable[[], None]) -> None:
        """Send the status and receive requests from now on, in a thread."""
        threading.Thread(target=self._watch, args=(page, end), name="tutti-launcher", daemon=True).start()

    def _watch(self, page: StopPage, end: Callable[[], None]) -> None:
        while True:
            try:
                asked = self._connection.recv() if self._connection.poll(STATUS_S) else None
            except (EOFError, OSError):
                break
            if asked == STOP:
                page.request()
            elif asked == STACKS:
                print_stacks()
            elif self.status is not None:
                self.send(RankStatus(*self.status()))
        if not self._leaves:
            end()


def connect(address: LauncherAddress, rank: int) -> LauncherConnection | None:
    """Connect a rank to the launching process; None if it cannot be reached."""
    for host in address.hosts:
        with suppress(OSError, EOFError, AuthenticationError):
            connected = socket.create_connection((host, address.port), _CONNECT_S)
            connected.settimeout(None)
            _limit_reading(connected, _GREETING_S)
            connection = Connection(connected.detach())
            answer_challenge(connection, address.key)
            deliver_challenge(connection, address.key)
            connection.send(rank)
            job = cast("RemoteJob", connection.recv())
            with socket.socket(fileno=os.dup(connection.fileno())) as same:
                _limit_reading(same, 0.0)
                _probe_often(same, address.silence_s)
            return LauncherConnection(connection, job)
    return None


def _limit_reading(connected: socket.socket, seconds: float) -> None:
    """Limit the time of a read by the kernel, as Python's own time-outs need its sockets; 0: no limit."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(seconds), 0))


def _probe_often(connected: socket.socket, silence_s: int) -> None:
    """Make the kernel probe the other side each second, and end the connection after a silence."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, 1),
        (socket.TCP_KEEPINTVL, 1),
        (socket.TCP_KEEPCNT, max(1, silence_s - 1)),
        (socket.TCP_USER_TIMEOUT, silence_s * 1000),
    ):
        connected.setsockopt(socket.IPPROTO_TCP, option, value)
