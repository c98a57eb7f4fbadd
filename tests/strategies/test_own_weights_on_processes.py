"""Local SGD, DiLoCo, gossip, AD-PSGD and Hogwild on real processes of this machine, and over MPI."""

from __future__ import annotations

import pytest
import torch

from tests.comm.ranks import World
from tests.mpi.mpirun import mpirun, needs_mpirun, results
from tests.strategies.alone import batch, start
from tests.strategies.processes import EXACT, STRATEGIES, train, train_with_all
from tutti.comm.virtual.world import VirtualWorld


def best(workers: int) -> torch.Tensor:
    """Where the mean of all batches' losses is smallest."""
    pairs = [batch(rank, step) for rank in range(workers) for step in range(4)]
    return sum(c * m for c, m in pairs) / sum(c for c, _ in pairs)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("workers", [2, 3])
def test_processes_do_what_virtual_ranks_do(workers: int) -> None:
    with World(workers, cores=2) as processes:
        found = processes.run(train_with_all)
    assert all(one == found[0] for one in found)
    assert found[0].keys() == STRATEGIES.keys()
    check(found[0], (workers,))


@pytest.mark.mpi
@pytest.mark.timeout(300)
@needs_mpirun
def test_ranks_of_mpi_on_two_hosts_do_what_virtual_ranks_do() -> None:
    (found,) = results(mpirun(3, "own_weights.py", "aab"))
    assert found["alike"]
    assert set(found["weights"]) == set(STRATEGIES) - {"hogwild"}
    check(found["weights"], (2, 1))
    assert found["apart"] == [0.0, 0.0]


def check(found: dict[str, list[float]], hosts: tuple[int, ...]) -> None:
    """Exact strategies end where virtual ranks end, all of them near the best weights."""
    target = best(sum(hosts))
    for name, weights in found.items():
        if name in EXACT:
            expected = VirtualWorld(sum(hosts), hosts).run(train, STRATEGIES[name])[0]
            assert weights == pytest.approx(expected, rel=1e-12)
        left = (torch.tensor(weights, dtype=torch.float64) - target).norm()
        assert left < 0.4 * (start() - target).norm(), name
