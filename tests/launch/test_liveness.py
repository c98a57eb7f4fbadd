"""The connections by which ranks of several hosts and the launching process see that the other side lives."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest

from tutti.launch.liveness import (
    DONE,
    FAILED,
    LivenessConnection,
    LivenessWatch,
    RankEnd,
    connect,
    first_lost,
)


@pytest.fixture
def watch() -> Iterator[LivenessWatch]:
    with closing(LivenessWatch(3, 30, elsewhere=False)) as made:
        yield made


def look_until_something_comes(watch: LivenessWatch) -> None:
    assert select.select([watch], [], [], 20)[0]
    watch.look()


def greet(watch: LivenessWatch, rank: int) -> LivenessConnection | None:
    """What a rank gets that connects."""
    found: list[LivenessConnection | None] = []
    rank_side = threading.Thread(target=lambda: found.append(connect(watch.address, rank)))
    rank_side.start()
    while rank_side.is_alive():
        if select.select([watch], [], [], 0.01)[0]:
            watch.look()
    rank_side.join()
    return found[0]


def greeted(watch: LivenessWatch, rank: int) -> LivenessConnection:
    connection = greet(watch, rank)
    assert connection is not None
    return connection


def test_a_rank_whose_connection_ends_is_lost_unless_it_says_why(watch: LivenessWatch) -> None:
    ranks = [greeted(watch, rank) for rank in range(3)]
    assert watch.complete
    for rank, letter in ((2, DONE), (1, b""), (0, b"")):
        if letter:
            ranks[rank].leave(letter)
        ranks[rank].close()
        while rank in watch.left:
            look_until_something_comes(watch)
    assert [(end.rank, end.letter, end.silent) for end in watch.ends] == [
        (2, DONE, False),
        (1, b"", False),
        (0, b"", False),
    ]
    assert first_lost(watch.ends) == [1]


def test_a_rank_ends_with_the_launching_process(watch: LivenessWatch) -> None:
    ended = threading.Event()
    with closing(greeted(watch, 0)) as connection:
        connection.end_when_lost(ended.set)
        assert not ended.is_set()
        watch.close()
        assert ended.wait(20)


def test_a_rank_that_trains_gives_signs_and_prints_its_stacks_when_asked(watch: LivenessWatch) -> None:
    printed = threading.Event()
    connection = greeted(watch, 1)
    connection.give_signs(lambda: (8, True), printed.set)
    connection.end_when_lost(lambda: None)
    while 1 not in watch.signs:
        look_until_something_comes(watch)
    assert (watch.signs[1].beat, watch.signs[1].waits) == (8, True)
    watch.ask_for_stacks(1)
    assert printed.wait(20)
    connection.leave(DONE)
    while not watch.ends:
        connection.close()
        look_until_something_comes(watch)
    assert watch.ends[0].letter == DONE


def test_a_rank_that_has_greeted_while_nobody_looked_is_no_stranger(
    watch: LivenessWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tutti.launch.liveness._GREETING_S", 0.1)
    found: list[LivenessConnection | None] = []
    rank = threading.Thread(target=lambda: found.append(connect(watch.address, 0)))
    rank.start()
    look_until_something_comes(watch)
    time.sleep(0.5)  # The greeting has come by now, and lies there.
    with socket.create_connection((watch.address.hosts[0], watch.address.port)):
        assert select.select([watch], [], [], 20)[0]
        watch.look()
    rank.join()
    assert found[0] is not None
    with closing(found[0]):
        assert watch.left == [0]


def test_strangers_and_launching_processes_of_other_runs_are_refused(watch: LivenessWatch) -> None:
    address = watch.address
    watch.address = replace(address, secret="00" * 32)
    assert greet(watch, 1) is None
    watch.address = address
    with socket.create_connection((address.hosts[0], address.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n" * 20)
        look_until_something_comes(watch)
        look_until_something_comes(watch)
    assert watch.seen == set()
    assert watch.ends == []


def test_a_rank_is_connected_once(watch: LivenessWatch) -> None:
    with closing(greeted(watch, 1)):
        assert greet(watch, 1) is None
        assert watch.seen == {1}


def test_dead_ends_among_the_addresses_cost_nothing(watch: LivenessWatch) -> None:
    with socket.create_server(("127.0.0.2", 0)) as other:
        other.close()
        watch.address = replace(watch.address, hosts=("127.0.0.2", *watch.address.hosts))
        greeted(watch, 0).close()


def test_the_silence_of_a_host_counts_before_the_ends_that_follow_from_it() -> None:
    ends = [RankEnd(0, 1.0, False, b""), RankEnd(3, 1.5, True, b""), RankEnd(2, 1.6, True, b"")]
    assert first_lost(ends) == [2, 3]
    assert first_lost(ends[:1]) == [0]


def test_ranks_that_end_after_one_has_failed_are_not_lost() -> None:
    done, failed, cut = (
        RankEnd(0, 1.0, False, DONE),
        RankEnd(1, 1.0, False, FAILED),
        RankEnd(2, 1.0, False, b""),
    )
    assert first_lost([done]) == []
    assert first_lost([done, failed, cut]) == []
    assert first_lost([done, cut, failed]) == [2]
