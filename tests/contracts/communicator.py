"""What every communicator must do. Each check is called by all ranks of a communicator, inside its world.

A check works at any world size and on any number of hosts, and leaves the communicator as it found it. Small
vectors (here: some ten elements) must be buffered by `send`; for long ones it may wait for their receiver.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import Tensor

from tutti.comm.base import ANY, Communicator, cut, keep_servers

DTYPES: Final = (torch.float32, torch.float64, torch.bfloat16, torch.int64)
LENGTHS: Final = (0, 1, 7, 4097, 300_000)
LONG: Final = 1_500_000
"""Elements of a message that no buffer should be expected to hold."""


def values(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    """The vector that `rank` contributes: the same wherever it is computed."""
    return _values(rank, length, dtype).clone()


@functools.cache
def _values(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + length)
    if dtype.is_floating_point:
        return torch.randn(length, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-1000, 1000, (length,), generator=generator, dtype=dtype)


@functools.cache
def expected_sum(size: int, length: int, dtype: torch.dtype) -> Tensor:
    """The sum of all ranks' `values`, summed as exactly as can be."""
    exact = torch.float64 if dtype.is_floating_point else dtype
    return torch.stack([values(rank, length, dtype).to(exact) for rank in range(size)]).sum(0)


def assert_close(found: Tensor, expected: Tensor, dtype: torch.dtype, terms: int) -> None:
    """`found` is `expected` up to the rounding of adding `terms` numbers of `dtype`."""
    if not dtype.is_floating_point:
        assert torch.equal(found, expected)
        return
    tolerance = terms * torch.finfo(dtype).eps
    # Written out: torch.testing takes seconds to import, in every rank.
    deviation = (found.double() - expected.double()).abs()
    assert (deviation <= tolerance * (10 + expected.double().abs())).all(), deviation.max()


def assert_equal_everywhere(comm: Communicator, vector: Tensor) -> None:
    """Every rank holds the same bits."""
    digest = hashlib.sha256(vector.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
    assert len(set(comm.all_gather_objects(digest))) == 1


def check_ranks_are_numbered_in_order(comm: Communicator) -> None:
    assert 0 <= comm.rank < comm.size
    assert comm.all_gather_objects(comm.rank) == list(range(comm.size))


def check_barrier_waits_for_every_rank(comm: Communicator) -> None:
    arrived = comm.counter()
    for round_number in range(1, 21):
        arrived.add()
        comm.barrier()
        assert arrived.add(0) >= round_number * comm.size
        comm.barrier()


def check_broadcast_from_every_root(comm: Communicator) -> None:
    for root in range(comm.size):
        for dtype in DTYPES:
            for length in LENGTHS if root == comm.size - 1 else LENGTHS[:-1]:
                vector = values(comm.rank, length, dtype)
                comm.broadcast(vector, root=root)
                assert torch.equal(vector, values(root, length, dtype))


def check_all_reduce_sums(comm: Communicator) -> None:
    for dtype in DTYPES:
        for length in LENGTHS:
            vector = values(comm.rank, length, dtype)
            comm.all_reduce(vector)
            assert_close(vector, expected_sum(comm.size, length, dtype), dtype, comm.size)
            assert_equal_everywhere(comm, vector)


def check_reduce_scatter_sums_its_slice_alone(comm: Communicator) -> None:
    for dtype in DTYPES:
        for length in LENGTHS:
            vector = values(comm.rank, length, dtype)
            own = cut(length, comm.size)[comm.rank]
            comm.reduce_scatter(vector)
            assert_close(vector[own], expected_sum(comm.size, length, dtype)[own], dtype, comm.size)
            before = values(comm.rank, length, dtype)
            assert torch.equal(vector[: own.start], before[: own.start])
            assert torch.equal(vector[own.stop :], before[own.stop :])


def check_all_gather_fills_in_the_other_slices(comm: Communicator) -> None:
    for dtype in DTYPES:
        for length in LENGTHS:
            vector = values(comm.rank, length, dtype)
            comm.all_gather(vector)
            for rank, part in enumerate(cut(length, comm.size)):
                assert torch.equal(vector[part], values(rank, length, dtype)[part])


def check_broadcast_object_from_every_root(comm: Communicator) -> None:
    for root in range(comm.size):
        value = {"rank": comm.rank, "nested": [None, (1.5, "zwölf")]}
        assert comm.broadcast_object(value, root=root) == {"rank": root, "nested": [None, (1.5, "zwölf")]}


def check_all_gather_objects_of_unequal_sizes(comm: Communicator) -> None:
    found = comm.all_gather_objects("x" * (comm.rank * 100_000))
    assert found == ["x" * (rank * 100_000) for rank in range(comm.size)]


def check_message_round_a_ring(comm: Communicator) -> None:
    for dtype in DTYPES:
        for length in (0, 1, 7):
            before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
            vector = values(comm.rank, length, dtype)
            comm.send(vector, to=after)
            vector.zero_()  # A message may be overwritten after it was sent.
            assert comm.recv(vector, source=before) == before
            assert torch.equal(vector, values(before, length, dtype))


def check_messages_of_other_tags_are_left_waiting(comm: Communicator) -> None:
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for tag in (1, 2, 3):
        comm.send(torch.tensor([tag, comm.rank]), to=after, tag=tag)
    for tag in (3, 1, 2):
        vector = torch.empty(2, dtype=torch.int64)
        assert comm.recv(vector, source=before, tag=tag) == before
        assert vector.tolist() == [tag, before]


def check_messages_from_any_source(comm: Communicator) -> None:
    if comm.rank > 0:
        for number in range(10):
            comm.send(torch.tensor([comm.rank, number]), to=0, tag=5)
    else:
        seen: list[list[int]] = [[] for _ in range(comm.size)]
        for _ in range(10 * (comm.size - 1)):
            vector = torch.empty(2, dtype=torch.int64)
            source = comm.recv(vector, source=ANY, tag=5)
            assert vector[0].item() == source
            seen[source].append(int(vector[1]))
        assert seen[1:] == [list(range(10))] * (comm.size - 1)
    comm.barrier()


def check_long_messages_to_one_rank(comm: Communicator) -> None:
    if comm.rank > 0:
        comm.send(torch.full((LONG,), float(comm.rank)), to=0)
    else:
        sources = set()
        for _ in range(comm.size - 1):
            vector = torch.zeros(LONG)
            source = comm.recv(vector, source=ANY)
            assert vector.min().item() == vector.max().item() == source
            sources.add(source)
        assert sources == set(range(1, comm.size))
    comm.barrier()


def check_exchange_round_a_ring(comm: Communicator) -> None:
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    for dtype in DTYPES:
        for length in (0, 1, 7):
            vector = torch.zeros(length, dtype=dtype)
            comm.exchange(values(comm.rank, length, dtype), after, vector, before)
            assert torch.equal(vector, values(before, length, dtype))


def check_exchange_keeps_the_order_of_messages_of_its_tag(comm: Communicator) -> None:
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    comm.send(torch.tensor([1.0]), to=after, tag=9)
    comm.send(torch.tensor([2.0]), to=after, tag=10)
    vector = torch.empty(1)
    comm.exchange(torch.tensor([3.0]), after, vector, before, tag=9)
    assert vector.item() == 1.0
    comm.recv(vector, source=before, tag=9)
    assert vector.item() == 3.0
    comm.recv(vector, source=before, tag=10)
    assert vector.item() == 2.0
    comm.barrier()


def check_waiting_names_who_has_sent(comm: Communicator) -> None:
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    assert comm.waiting(tag=11) is None
    assert comm.waiting(tag=11, source=before) is None
    comm.barrier()
    comm.send(torch.tensor([comm.rank]), to=after, tag=11)
    while (source := comm.waiting(tag=11)) is None:
        comm.compute(1e-6)
    assert source == before
    assert comm.waiting(tag=11, source=before) == before
    assert comm.waiting(tag=12) is None
    if comm.size > 2:
        assert comm.waiting(tag=11, source=after) is None
    vector = torch.empty(1, dtype=torch.int64)
    assert comm.recv(vector, source=source, tag=11) == before
    assert vector.item() == before
    assert comm.waiting(tag=11) is None
    comm.barrier()


def check_counter_hands_out_each_value_once(comm: Communicator) -> None:
    counter = comm.counter()
    mine = [counter.add() for _ in range(50)]
    assert mine == sorted(mine)
    everyone = [value for values in comm.all_gather_objects(mine) for value in values]
    assert sorted(everyone) == list(range(50 * comm.size))


def check_shared_memory_is_zero_and_seen_by_the_host(comm: Communicator) -> None:
    node = comm.node
    for dtype in DTYPES:
        rows = node.shared(node.size, 1000, dtype=dtype)
        assert rows.shape == (node.size, 1000)
        assert rows.dtype == dtype
        assert not rows.any()
        node.barrier()
        rows[node.rank] = node.rank + 1
        node.barrier()
        assert torch.equal(rows, torch.arange(1, node.size + 1).to(dtype).unsqueeze(1).expand_as(rows))
        node.barrier()


def check_lock_excludes_the_other_ranks(comm: Communicator) -> None:
    node = comm.node
    word = node.shared(1, dtype=torch.int64)
    lock = node.lock()
    for _ in range(50):
        with lock:
            seen = int(word[0])
            comm.compute(1e-6)
            word[0] = seen + 1
    node.barrier()
    assert int(word[0]) == 50 * node.size
    node.barrier()


def check_the_last_ranks_are_kept_as_servers(comm: Communicator) -> None:
    assert comm.servers is None
    assert keep_servers(comm, 0) is comm
    with pytest.raises(ValueError, match="no rank is left"):
        keep_servers(comm, comm.size)
    for count in range(1, comm.size):
        part, workers = keep_servers(comm, count), comm.size - count
        servers = part.servers
        assert servers is not None
        assert servers.serving == (comm.rank >= workers)
        assert part.size == (count if servers.serving else workers)
        assert servers.ranks == tuple(range(workers, comm.size))
        assert servers.comm is comm
        part.close()
        comm.barrier()


def check_split_by_parity(comm: Communicator) -> None:
    part = comm.split(comm.rank % 2)
    assert part is not None
    members = [rank for rank in range(comm.size) if rank % 2 == comm.rank % 2]
    assert (part.rank, part.size) == (members.index(comm.rank), len(members))
    vector = torch.tensor([float(comm.rank)])
    part.all_reduce(vector)
    assert vector.item() == sum(members)
    assert part.all_gather_objects(comm.rank) == members
    part.close()
    comm.barrier()


def check_split_has_messages_of_its_own(comm: Communicator) -> None:
    part = comm.split(0)
    assert part is not None
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    comm.send(torch.tensor([1.0]), to=after)
    part.send(torch.tensor([2.0]), to=after)
    vector = torch.empty(1)
    part.recv(vector, source=before)
    assert vector.item() == 2.0
    comm.recv(vector, source=before)
    assert vector.item() == 1.0
    part.close()
    comm.barrier()


def check_node_is_the_ranks_of_one_host(comm: Communicator) -> None:
    node = comm.node
    everyone = comm.all_gather_objects((node.rank, node.size))
    assert sum(1 for local_rank, _ in everyone if local_rank == 0) == comm.hosts
    vector = torch.ones(1)
    node.all_reduce(vector)
    assert vector.item() == node.size
    assert node.node.size == node.size
    assert node.hosts == 1


def check_cross_is_one_lane_over_the_hosts(comm: Communicator) -> None:
    sizes = comm.all_gather_objects((comm.node.rank, comm.node.size))
    lanes = min(local_size for _, local_size in sizes)
    cross = comm.cross
    if comm.node.rank >= lanes:
        assert cross is None
    else:
        assert cross is not None
        assert cross.size == comm.hosts
        assert cross.all_gather_objects(comm.node.rank) == [comm.node.rank] * comm.hosts
        vector = torch.ones(7)
        cross.all_reduce(vector)
        assert torch.equal(vector, torch.full((7,), float(comm.hosts)))
    comm.barrier()


CHECKS: Final[tuple[Callable[[Communicator], None], ...]] = tuple(
    check for name, check in list(globals().items()) if name.startswith("check_")
)
"""All checks, in the order of this page."""
