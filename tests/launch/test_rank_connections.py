"""The connections between the launching process and the ranks that mpirun starts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from tutti.launch import rank_connections
from tutti.launch.exit_reports import Report
from tutti.launch.hangs import RankStatus
from tutti.launch.rank_connections import (
    STOP,
    LauncherConnection,
    RankConnections,
    RemoteJob,
    Started,
    Stoppable,
    connect,
)
from tutti.launch.stop_request import StopPage

LIMIT_S = 20.0
JOB = RemoteJob("package:entry", b"payload", 2, [], ["program"], 2)


@pytest.fixture
def connections() -> Iterator[RankConnections]:
    with closing(RankConnections(2, 3, JOB, StopPage(), elsewhere=False)) as made:
        yield made


def connected(connections: RankConnections, rank: int) -> LauncherConnection:
    """A rank that has connected."""
    found: list[LauncherConnection | None] = []
    thread = threading.Thread(target=lambda: found.append(connect(connections.address, rank)))
    thread.start()
    while rank not in connections.ranks:
        connections.look(LIMIT_S)
    thread.join()
    assert found[0] is not None
    return found[0]


def test_rank_0_alone_gets_the_payload_and_the_launching_process_hears_all(
    connections: RankConnections,
) -> None:
    first, second = connected(connections, 0), connected(connections, 1)
    assert (first.job, second.job) == (JOB, replace(JOB, payload=b""))
    assert connections.complete
    first.send(Started(("/dev/shm/x",)))
    first.send(Stoppable(True))
    first.send(RankStatus(5, True))
    report = Report(0, 1.0, value=b"x" * 3_000_000)
    threading.Thread(target=first.leave, args=(report,)).start()
    while connections.ranks[0].report is None:
        connections.look(LIMIT_S)
    heard = connections.ranks[0]
    assert heard.report == replace(report, at=heard.report.at)  # type: ignore[union-attr]
    assert heard.segments == ("/dev/shm/x",)
    assert heard.status is not None
    assert (heard.status.steps, heard.status.waits) == (5, True)
    assert connections._page.stoppable


def test_a_request_reaches_connected_and_later_ranks(connections: RankConnections) -> None:
    pages = [StopPage(), StopPage()]
    first = connected(connections, 0)
    first.watch(pages[0], lambda: None)
    connections._page.request()
    connections.send(STOP)
    connected(connections, 1).watch(pages[1], lambda: None)
    while not all(page.requested for page in pages):
        pass


def test_a_rank_whose_launching_process_is_gone_ends(connections: RankConnections) -> None:
    ended = threading.Event()
    connected(connections, 0).watch(StopPage(), ended.set)
    connections.close()
    assert ended.wait(LIMIT_S)


def test_the_end_of_a_rank_is_noticed(connections: RankConnections) -> None:
    connected(connections, 1)._connection.close()
    connections.settle(LIMIT_S)
    rank = connections.ranks[1]
    assert (rank.ended_at is not None, rank.silent, rank.report) == (True, False, None)


def test_a_stranger_is_no_rank(connections: RankConnections, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_connections, "_STRANGER_S", 1)
    with socket.create_connection(("127.0.0.1", connections.address.port)):
        connections.look(LIMIT_S)
    wrong = replace(connections.address, key=b"another")
    thread = threading.Thread(target=connect, args=(wrong, 0))
    thread.start()
    connections.look(LIMIT_S)
    thread.join()
    assert connections.ranks == {}
    connected(connections, 0)


def test_a_launching_process_that_cannot_be_reached_is_none(connections: RankConnections) -> None:
    connections.close()
    assert connect(connections.address, 0) is None
