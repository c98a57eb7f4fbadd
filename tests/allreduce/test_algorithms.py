"""Every algorithm sums what every rank has, in the steps and bytes that its formula says."""

from __future__ import annotations

import sys
from functools import partial
from math import ceil, log2

import cloudpickle
import pytest
import torch
from torch import Tensor

from tests.comm.ranks import World
from tutti.allreduce import ALGORITHMS
from tutti.allreduce.ranks import Ranks, Sent
from tutti.allreduce.torus import width
from tutti.comm.base import Communicator
from tutti.comm.network import Network, all_reduce_s
from tutti.comm.virtual.world import VirtualWorld

SIZES = [1, 2, 3, 5, 8, 12]
HOSTS: list[tuple[int, ...]] = [(1, 1), (2, 2), (4, 4, 4), (1, 3), (3, 1, 2), (5, 1)]


FREE, NETWORK = Network.free(), Network(1e-4, 1e9, 1e-4, 1e9)

# The ranks' processes cannot import this module; they get its functions by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def given(rank: int, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A rank's vector of whole numbers: their sums are exact in any order."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-1000, 1000, (length,), generator=generator).to(dtype)


def run(
    comm: Communicator, name: str, length: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Sent]:
    ranks, vector = Ranks(comm), given(comm.rank, length, dtype)
    ALGORITHMS[name](ranks, vector)
    return vector, ranks.sent


def world(ranks: int | tuple[int, ...], network: Network = FREE) -> VirtualWorld:
    hosts = (ranks,) if isinstance(ranks, int) else ranks
    return VirtualWorld(sum(hosts), hosts, network)


@pytest.mark.parametrize("length", [0, 1, 2, 7, 240])
@pytest.mark.parametrize("ranks", [*SIZES, *HOSTS], ids=str)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_rank_gets_the_sum(name: str, ranks: int | tuple[int, ...], length: int) -> None:
    here = world(ranks)
    expected = sum([given(rank, length) for rank in range(here.ranks)])
    for found, _ in here.run(run, name, length):
        assert torch.equal(found, expected)


def in_thirds(comm: Communicator, name: str, length: int) -> Tensor:
    vector = torch.randn(length, generator=torch.Generator().manual_seed(comm.rank)) / 3
    ALGORITHMS[name](Ranks(comm), vector)
    return vector


@pytest.mark.parametrize("ranks", [3, 8, 12, (3, 1, 2)], ids=str)
@pytest.mark.parametrize("name", ALGORITHMS)
def test_all_ranks_get_the_same_bits(name: str, ranks: int | tuple[int, ...]) -> None:
    first, *others = world(ranks).run(in_thirds, name, 1001)
    for other in others:
        assert torch.equal(other, first)
    assert torch.equal(world(ranks).run(in_thirds, name, 1001)[0], first)


N = 2400  # divisible by every size below
BYTES = 4 * N


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_takes_2_p_minus_1_steps_and_the_least_bytes(size: int) -> None:
    for _, sent in world(size).run(run, "ring", N):
        assert sent == Sent(2 * (size - 1), 2 * (size - 1) * BYTES // size)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
def test_halving_and_doubling_takes_2_log_p_steps_and_the_least_bytes(size: int) -> None:
    for _, sent in world(size).run(run, "halving_doubling", N):
        assert sent == Sent(2 * int(log2(size)), 2 * (size - 1) * BYTES // size)


@pytest.mark.parametrize("size", SIZES)
def test_a_tree_takes_2_log_p_steps_at_its_root_and_2_vectors_for_each_other_rank(size: int) -> None:
    counts = [sent for _, sent in world(size).run(run, "tree", N)]
    assert counts[0].steps == max(sent.steps for sent in counts) == 2 * ceil(log2(size))
    assert sum(sent.nbytes for sent in counts) == 2 * (size - 1) * BYTES


@pytest.mark.parametrize(("hosts", "each"), [(1, 4), (2, 1), (2, 3), (4, 2), (3, 4)])
def test_hierarchical_takes_4_k_minus_1_and_2_h_minus_1_steps(hosts: int, each: int) -> None:
    leader = Sent(
        4 * (each - 1) + 2 * (hosts - 1),
        4 * (each - 1) * BYTES // each + 2 * (hosts - 1) * BYTES // hosts,
    )
    other = Sent(4 * (each - 1) - (each - 2), 3 * (each - 1) * BYTES // each)
    for rank, (_, sent) in enumerate(world((each,) * hosts).run(run, "hierarchical", N)):
        assert sent == (other if rank % each else leader)


@pytest.mark.parametrize(
    ("ranks", "across"),
    [((3, 3), 3), ((2, 2, 2, 2), 2), (12, 4), (16, 4), (6, 3), (5, 5), ((1,) * 8, 4)],
    ids=str,
)
def test_a_torus_takes_steps_for_one_row_and_one_column_and_the_least_bytes(
    ranks: int | tuple[int, ...], across: int
) -> None:
    here = world(ranks)
    down = here.ranks // across
    for _, sent in here.run(run, "torus", N):
        assert sent.steps == 2 * (across - 1) + 2 * (down - 1)
        assert sent.nbytes == 2 * (here.ranks - 1) * BYTES // here.ranks


@pytest.mark.parametrize(
    ("size", "hosts", "across"), [(8, 2, 4), (8, 4, 2), (8, 8, 4), (8, 3, 4), (7, 1, 7), (1, 1, 1)]
)
def test_rows_of_a_torus_are_hosts_where_these_are_even(size: int, hosts: int, across: int) -> None:
    assert width(size, hosts) == across


def test_halving_and_doubling_takes_the_time_of_its_formula() -> None:
    here = world((1,) * 8, NETWORK)
    here.run(run, "halving_doubling", 240_000)
    assert here.seconds == pytest.approx(all_reduce_s(NETWORK.remote, 8, 4 * 240_000), rel=0.05)


def all_names(comm: Communicator, lengths: tuple[int, ...]) -> list[Tensor]:
    return [run(comm, name, length)[0] for name in ALGORITHMS for length in lengths]


@pytest.mark.parametrize("size", [2, 3])
def test_processes_of_a_host_get_the_sum(size: int) -> None:
    lengths = (1, 1000, 300_000)  # the last is longer than what the messages' rings hold
    with World(size) as processes:
        for found in processes.run(partial(all_names, lengths=lengths)):
            expected = [sum([given(rank, length) for rank in range(size)]) for length in lengths]
            for got, wanted in zip(found, expected * len(ALGORITHMS), strict=True):
                assert torch.equal(got, wanted)
