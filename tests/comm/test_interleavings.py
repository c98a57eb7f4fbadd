"""The barrier and the rows in every order of their loads and stores; planted bugs are found."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch

from tests.comm.interleavings import Broken, Execution, Order, Programs, SharedArena, Store, Words, explore
from tutti.comm.reductions import SUM
from tutti.comm.shm import barrier, collectives
from tutti.comm.shm.arena import Arena
from tutti.comm.shm.barrier import Call, Kind
from tutti.comm.shm.collectives import HostCollectives
from tutti.comm.shm.layout import CALL, LINE, ControlLayout

ROW = 32
"""Bytes of a row: two elements of float64 in each half of it."""

Act = Callable[[HostCollectives, Execution], None]


@pytest.fixture(autouse=True)
def small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "ROW", ROW)
    monkeypatch.setattr(collectives, "HALF", ROW // 2)
    monkeypatch.setattr(collectives, "ONE_HOP", 8)


def ranks_that(
    monkeypatch: pytest.MonkeyPatch, size: int, *acts: Act, kind: type[HostCollectives] = HostCollectives
) -> Callable[[Execution], Programs]:
    """What makes ranks that do so, one act after the other."""

    def build(execution: Execution) -> Programs:
        words = cast("memoryview", Words(execution, ControlLayout(size).words))
        arena = SharedArena(execution, 2 * size * ROW)
        for module, name in ((collectives, "move_few"), (collectives, "move")):
            monkeypatch.setattr(module, name, arena.move)
        monkeypatch.setattr(barrier, "fence", execution.fence)

        def program(rank: int) -> None:
            group = kind(cast("Arena", arena), 0, words, rank, range(size), crowded=True)
            for act in acts:
                act(group, execution)

        return [lambda rank=rank: program(rank) for rank in range(size)]

    return build


def summing(number: int, length: int = 1) -> Act:
    """An all-reduce of a vector of so many elements; those of rank r are `number` (r + 1), + 1, ..."""

    def act(group: HostCollectives, execution: Execution) -> None:
        base = torch.arange(length, dtype=torch.float64)
        vector = base + number * (group.rank + 1)
        execution.finish(group.all_reduce(vector, SUM))
        ranks = group.size
        expected = ranks * base + number * ranks * (ranks + 1) / 2
        assert vector.tolist() == expected.tolist()

    return act


def broadcasting(number: int, root: int) -> Act:
    def act(group: HostCollectives, execution: Execution) -> None:
        vector = torch.tensor([float(number * (group.rank + 1))], dtype=torch.float64)
        execution.finish(group.broadcast(vector, root))
        assert vector.tolist() == [number * (root + 1)]

    return act


def gathering(number: int) -> Act:
    def act(group: HostCollectives, execution: Execution) -> None:
        outputs = [torch.zeros(1, dtype=torch.float64) for _ in range(group.size)]
        execution.finish(
            group.all_gather(torch.tensor([float(number + group.rank)], dtype=torch.float64), outputs)
        )
        assert [output.item() for output in outputs] == [number + rank for rank in range(group.size)]

    return act


def telling(number: int) -> Act:
    def act(group: HostCollectives, execution: Execution) -> None:
        found: list[list[list[int]]] = []

        def steps() -> Iterator[bool]:
            found.append((yield from group.tell([number + group.rank], Call.of(Kind.ALL_TO_ALL))))

        execution.finish(steps())
        assert found == [[[number + rank] for rank in range(group.size)]]

    return act


def passing(arrived: dict[int, int]) -> Act:
    """A barrier that nobody passes before all have come."""

    def act(group: HostCollectives, execution: Execution) -> None:
        mine = arrived[group.rank] = arrived.get(group.rank, 0) + 1
        execution.finish(group.barrier())
        assert all(arrived.get(rank, 0) >= mine for rank in range(group.size))

    return act


@pytest.mark.parametrize(
    ("size", "order"), [(2, Order.SEQUENTIAL), (2, Order.TOTAL_STORE), (3, Order.SEQUENTIAL)]
)
def test_nobody_passes_a_barrier_before_all_have_come(
    monkeypatch: pytest.MonkeyPatch, size: int, order: Order
) -> None:
    def build(execution: Execution) -> Programs:
        act = passing({})
        return ranks_that(monkeypatch, size, act, act, act)(execution)

    assert explore(build, order) > 50


@pytest.mark.parametrize("order", Order)
def test_two_ranks_have_the_same_sums_in_every_order(monkeypatch: pytest.MonkeyPatch, order: Order) -> None:
    monkeypatch.setattr(barrier, "ORDERED", order is not Order.PARTIAL_STORE)
    assert explore(ranks_that(monkeypatch, 2, summing(1), summing(10), summing(100)), order) > 500


@pytest.mark.parametrize(
    "acts",
    [
        [summing(1, length=4), summing(10)],
        [summing(1, length=3), broadcasting(5, root=1), summing(7)],
        [gathering(3), telling(5), gathering(7)],
    ],
    ids=["a sum in pieces", "a broadcast between sums", "gathers"],
)
def test_two_ranks_have_the_same_results_in_every_order(
    monkeypatch: pytest.MonkeyPatch, acts: list[Act]
) -> None:
    assert explore(ranks_that(monkeypatch, 2, *acts)) > 100


def test_three_ranks_have_the_same_results_in_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert explore(ranks_that(monkeypatch, 3, telling(1))) > 500


def test_ranks_that_call_different_things_are_told_so_in_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def differing(group: HostCollectives, execution: Execution) -> None:
        with pytest.raises(ValueError, match=r"rank \d called"):
            (summing(1) if group.rank else gathering(1))(group, execution)

    assert explore(ranks_that(monkeypatch, 2, summing(1), differing, summing(2))) > 100


def of_the_phase(store: Store) -> bool:
    return isinstance(store.place, int) and store.place % LINE < CALL


def of_the_call(store: Store) -> bool:
    return isinstance(store.place, int) and store.place % LINE >= CALL


def of_a_row(store: Store) -> bool:
    return store.place == "rows"


@pytest.mark.parametrize("late", [of_a_row, of_the_call])
def test_a_store_that_is_moved_behind_the_flag_is_found(
    monkeypatch: pytest.MonkeyPatch, late: Callable[[Store], bool]
) -> None:
    acts = [summing(1), gathering(2), summing(10)]
    with pytest.raises(Broken):
        explore(ranks_that(monkeypatch, 2, *acts), late=(late, of_the_phase))


def test_a_fence_that_is_missing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Broken):
        explore(ranks_that(monkeypatch, 2, summing(1), summing(10)), Order.PARTIAL_STORE)


class OneSet(HostCollectives):
    """Always the same rows."""

    _set = property(lambda self: 0, lambda self, value: None)


class OneWord(HostCollectives):
    """One set of words for even and odd phases."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._parities = (self._parities[0], self._parities[0])


@pytest.mark.parametrize("kind", [OneSet, OneWord])
def test_two_sets_are_needed(monkeypatch: pytest.MonkeyPatch, kind: type[HostCollectives]) -> None:
    with pytest.raises(Broken):
        explore(ranks_that(monkeypatch, 2, gathering(1), telling(3), gathering(10), kind=kind))
