"""The barrier, the rows and the rings in every order of their loads and stores."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import pytest
import torch

from tests.comm.interleavings import Broken, Execution, Order, Programs, SharedArena, Words, explore
from tutti.comm.reductions import SUM
from tutti.comm.shm import barrier, collectives, point_to_point, rings
from tutti.comm.shm.arena import Arena
from tutti.comm.shm.barrier import Call, Collective
from tutti.comm.shm.collectives import HostCollectives
from tutti.comm.shm.layout import ControlLayout, HostGroup
from tutti.comm.shm.point_to_point import HostMessages, Receiving
from tutti.comm.shm.rings import HEADER

ROW = 32
"""Bytes of a row: two elements of float64 in each half of it."""

Act = Callable[[HostCollectives, Execution], None]


@pytest.fixture(autouse=True)
def small_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "ROW", ROW)
    monkeypatch.setattr(collectives, "HALF", ROW // 2)
    monkeypatch.setattr(collectives, "SHORT", 8)


def group_of(arena: SharedArena, words: memoryview, rank: int, size: int) -> HostGroup:
    group = HostGroup(cast("Arena", arena), 0, rank, range(size))
    group.words = words
    return group


def ranks_that(monkeypatch: pytest.MonkeyPatch, size: int, *acts: Act) -> Callable[[Execution], Programs]:
    """What makes ranks that do so, one act after the other."""

    def build(execution: Execution) -> Programs:
        words = cast("memoryview", Words(execution, ControlLayout(size).words))
        arena = SharedArena(execution, 2 * size * ROW)
        for module, name in ((collectives, "move_few"), (collectives, "move")):
            monkeypatch.setattr(module, name, arena.move)
        monkeypatch.setattr(barrier, "fence", execution.fence)

        def program(rank: int) -> None:
            group = HostCollectives(group_of(arena, words, rank, size), crowded=True)
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
            found.append(
                (yield from group.all_gather_ints([number + group.rank], Call.of(Collective.ALL_TO_ALL)))
            )

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
def test_no_rank_passes_a_barrier_before_all_have_come(
    monkeypatch: pytest.MonkeyPatch, size: int, order: Order
) -> None:
    def build(execution: Execution) -> Programs:
        act = passing({})
        return ranks_that(monkeypatch, size, act, act, act)(execution)

    assert explore(build, order) > 50


@pytest.mark.parametrize("order", Order)
def test_two_ranks_have_the_same_sums_in_every_order(monkeypatch: pytest.MonkeyPatch, order: Order) -> None:
    monkeypatch.setattr(barrier, "ORDERED", order is not Order.PARTIAL_STORE)
    acts = [summing(1), summing(10), summing(100)] if order is Order.SEQUENTIAL else [summing(1), summing(10)]
    assert explore(ranks_that(monkeypatch, 2, *acts), order) > 100


@pytest.mark.parametrize(
    "acts",
    [
        [summing(1, length=4)],
        [gathering(3), telling(5), gathering(7)],
    ],
    ids=["a sum in pieces", "gathers"],
)
def test_two_ranks_have_the_same_results_in_every_order(
    monkeypatch: pytest.MonkeyPatch, acts: list[Act]
) -> None:
    assert explore(ranks_that(monkeypatch, 2, *acts)) > 100


def test_ranks_that_call_different_things_are_told_so_in_every_order(monkeypatch: pytest.MonkeyPatch) -> None:
    def differing(group: HostCollectives, execution: Execution) -> None:
        with pytest.raises(ValueError, match=r"rank \d called"):
            (summing(1) if group.rank else gathering(1))(group, execution)

    assert explore(ranks_that(monkeypatch, 2, summing(1), differing, summing(2))) > 100


def test_a_fence_that_is_missing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Broken):
        explore(ranks_that(monkeypatch, 2, summing(1), summing(10)), Order.PARTIAL_STORE)


# --- rings

RING = HEADER
"""Bytes of a ring: as short as it can be, so that every header and every piece overwrites the one before."""


def messages_of(
    monkeypatch: pytest.MonkeyPatch,
    sent: Sequence[tuple[int, int]],
    received: Sequence[int],
    length: int = RING,
) -> Callable[[Execution], Programs]:
    """Rank 0 sends vectors of some (tag, length) to rank 1, through a ring of `length` bytes."""
    for module, name, value in (
        (rings, "RING", length),
        (rings, "PIECE", HEADER),
        (point_to_point, "PIECE", HEADER),
        (point_to_point, "STALLS", 1 << 60),
        (rings.time, "monotonic_ns", lambda: 0),
        (torch, "frombuffer", lambda headers, dtype: headers.bytes),
    ):
        monkeypatch.setattr(module, name, value)
    layout = ControlLayout(2)
    writers = {layout.sent(0, 1): 0, layout.received(0, 1): 1}
    vectors = {tag: torch.arange(1, elements + 1, dtype=torch.float64) * tag for tag, elements in sent}

    def build(execution: Execution) -> Programs:
        words = cast("memoryview", Words(execution, layout.words, writers))
        arena = SharedArena(execution, length)
        monkeypatch.setattr(rings, "fence", execution.fence)
        sender, receiver = (HostMessages(group_of(arena, words, rank, 2)) for rank in range(2))

        def send() -> None:
            for tag, _ in sent:
                execution.finish(sender.send(vectors[tag], 1, tag))

        def receive() -> None:
            for tag in received:
                vector = torch.zeros_like(vectors[tag])
                execution.finish(receiver.recv(vector, Receiving(0, tag)))
                assert vector.tolist() == vectors[tag].tolist()

        return [send, receive]

    return build


LONG_AND_SHORT = [(1, 1), (2, 5), (3, 0), (4, 4)]
"""Messages by (tag, length): bodies with padding, without, and none."""


@pytest.mark.parametrize("order", Order)
@pytest.mark.parametrize("received", [(1, 2, 3, 4), (2, 4, 1, 3)], ids=["in order", "by tag"])
def test_messages_are_whole_in_every_order(
    monkeypatch: pytest.MonkeyPatch, order: Order, received: Sequence[int]
) -> None:
    monkeypatch.setattr(rings, "ORDERED", order is not Order.PARTIAL_STORE)
    assert explore(messages_of(monkeypatch, LONG_AND_SHORT, received), order) > 50


def test_a_fence_that_is_missing_in_a_ring_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rings, "ORDERED", True)
    with pytest.raises(Broken):
        explore(messages_of(monkeypatch, LONG_AND_SHORT, (1, 2, 3, 4)), Order.PARTIAL_STORE)
