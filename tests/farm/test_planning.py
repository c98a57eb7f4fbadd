"""Tests of the plan of a farm: which ranks run on which cores, with which threads."""

from __future__ import annotations

from itertools import product

import pytest

from tutti.errors import BadOption
from tutti.farm.block_placement import place_blocks, settings_of
from tutti.launch.cores import Cores


def machine(cores: int, threads: int = 1, quota: int | None = None, first: int = 0) -> Cores:
    """A machine, or what taskset or a launcher leaves of it: cores from `first` on."""
    physical = tuple(tuple(first + core + 64 * i for i in range(threads)) for core in range(cores))
    return Cores(physical, quota)


@pytest.mark.parametrize(
    "cores",
    [machine(1), machine(2), machine(7), machine(8, 2), machine(12, first=5), machine(16, 2, quota=5)],
    ids=str,
)
def test_a_plan_never_takes_more_than_the_cores(cores: Cores) -> None:
    for workers, servers, threads, jobs in product((1, 2, 3, 5), (0, 1, 2), (None, 1, 2, 3), (None, 1, 7)):
        if workers > cores.usable:
            continue
        placement, blocks = place_blocks(workers + servers, None, threads, jobs, servers, cores)
        ranks = settings_of(placement, blocks, cores.logical)
        assert [len(block) for block in ranks] == [workers + servers] * blocks
        working = [rank for block in ranks for rank in block[:workers]]
        if blocks > 1 or workers * (threads or 1) <= cores.usable:
            assert sum(rank.threads for rank in working) <= cores.usable
            assert not placement.warnings
        else:
            # So many threads were asked for.
            assert placement.warnings
        if placement.cores:
            taken = [cpu for rank in working for cpu in rank.cores]
            assert len(taken) == len(set(taken))
            assert set(taken) == set(cores.logical)
            assert all(len(rank.cores) >= rank.threads for rank in working)
        for block in ranks:
            own = {cpu for rank in block[:workers] for cpu in rank.cores}
            assert [rank.threads for rank in block[workers:]] == [1] * servers
            assert all({*rank.cores} == own for rank in block[workers:])
        # Another block would not fit, unless it had nothing to do.
        if jobs is None:
            assert (blocks + 1) * workers * (threads or 1) > cores.usable


def test_servers_take_no_core_from_workers() -> None:
    placement, blocks = place_blocks(3, None, None, None, 1, machine(4))
    assert (blocks, placement.workers, placement.servers) == (2, 4, 2)
    ranks = settings_of(placement, blocks, range(4))
    assert [[rank.cores for rank in block] for block in ranks] == [[(0,), (1,), (0, 1)], [(2,), (3,), (2, 3)]]
    # Two workers and a server on two cores.
    assert place_blocks(3, None, None, None, 1, machine(2))[1] == 1
    with pytest.raises(BadOption, match="--servers is 2, but the block has 2 ranks, which leaves none"):
        place_blocks(2, None, None, None, 2, machine(8))


def test_too_many_ranks_give_one_warning_or_are_refused() -> None:
    placement, _ = place_blocks(3, 2, 2, None, 1, machine(2))
    (said,) = placement.warnings
    assert said.startswith("blocks x ranks x threads = 2 x 2 x 2 = 8, more than the 2 cores that may be used")
    assert not place_blocks(3, 2, 2, None, 1, machine(8))[0].warnings
    with pytest.raises(BadOption, match="1,000,000 ranks are too many"):
        place_blocks(4, 250_000, 1, None, 1, machine(2))
