"""The cost model against the formulas of Thakur, Rabenseifner, Gropp (2005), written out by hand."""

from __future__ import annotations

import pytest

from tutti.comm import network
from tutti.comm.network import Link, Network

ALPHA, BETA = 1e-3, 1e-6
LINK = Link(ALPHA, 1 / BETA)
SHORT, LONG = 8, 8_000_000


@pytest.mark.parametrize(("ranks", "rounds"), [(1, 0), (2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (1024, 10)])
def test_rounds_of_a_tree(ranks: int, rounds: int) -> None:
    assert network.rounds(ranks) == rounds
    assert network.barrier_s(LINK, ranks) == pytest.approx(rounds * ALPHA)


def test_short_all_reduce_is_recursive_doubling() -> None:
    assert network.all_reduce_s(LINK, 8, SHORT) == pytest.approx(3 * (ALPHA + SHORT * BETA))


def test_long_all_reduce_moves_each_byte_at_most_twice() -> None:
    assert network.all_reduce_s(LINK, 8, LONG) == pytest.approx(6 * ALPHA + 2 * 7 / 8 * LONG * BETA)


def test_broadcast_is_a_tree_for_short_and_a_scatter_for_long_vectors() -> None:
    assert network.broadcast_s(LINK, 8, SHORT) == pytest.approx(3 * (ALPHA + SHORT * BETA))
    assert network.broadcast_s(LINK, 8, LONG) == pytest.approx(10 * ALPHA + 2 * 7 / 8 * LONG * BETA)


def test_gather_and_scatter_move_what_belongs_to_the_others() -> None:
    expected = 2 * ALPHA + 3 / 4 * LONG * BETA
    assert network.all_gather_s(LINK, 4, LONG) == pytest.approx(expected)
    assert network.reduce_scatter_s(LINK, 4, LONG) == pytest.approx(expected)


def test_all_reduce_between_hosts_is_reduced_inside_them_first() -> None:
    model = Network(ALPHA, 1 / BETA, ALPHA / 10, 10 / BETA)
    inside = 2 * (ALPHA / 10 + LONG * BETA / 10 / 2)
    between = ALPHA + LONG * BETA
    assert model.all_reduce_s((2, 2), LONG) == pytest.approx(inside + between, rel=1e-6)
    assert model.all_reduce_s((4,), LONG) == network.all_reduce_s(model.local, 4, LONG)


@pytest.mark.parametrize(
    "bad", [{"latency_s": -1.0}, {"bandwidth_bytes_per_s": 0.0}, {"local_latency_s": float("nan")}]
)
def test_impossible_links_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected"):
        Network(**bad)
