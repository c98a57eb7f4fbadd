"""The centre in shared memory: slots, answers and counts, on virtual ranks and on processes."""

from __future__ import annotations

import sys

import cloudpickle
import pytest
import torch
from torch import Tensor, nn, optim

from tests.comm.ranks import World
from tests.parameter_server import two_types
from tests.parameter_server.two_types import TwoTypes, values, vectors
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import Fault, VirtualWorld
from tutti.errors import PeerLost
from tutti.parameter_server.base import Rule
from tutti.parameter_server.rules import AddRule, ElasticRule, OptimizerRule
from tutti.parameter_server.shared_memory import SharedCentre
from tutti.replica import Replica
from tutti.strategies.base import WeightPlacement
from tutti.strategies.placement import place

# The ranks cannot import these pages by their names: their functions travel by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
cloudpickle.register_pickle_by_value(two_types)


def join(comm: Communicator, rule: Rule | None = None, parts: int = 3) -> tuple[Replica, SharedCentre]:
    replica = place(TwoTypes(), comm, WeightPlacement.PRIVATE)
    return replica, SharedCentre(comm, replica.flats, rule or AddRule(), parts)


def check_a_push_moves_every_slot_once(comm: Communicator) -> None:
    replica, centre = join(comm)
    assert len(centre.slots) > 1
    for _ in range(5):
        centre.push(vectors(replica, 1.0))
    into = vectors(replica, 7.0)
    centre.read(into)
    assert values(into) == {1.0 + 5 * comm.size}
    assert centre.version == 5 * comm.size


def check_exchanges_lose_nothing(comm: Communicator) -> None:
    """Elastic exchanges keep the sum of all weights, whatever comes between which."""
    replica, centre = join(comm, ElasticRule(0.9, comm.size))
    own = vectors(replica, float(comm.rank))
    for _ in range(20):
        centre.exchange(own)
    into = vectors(replica, 0.0)
    centre.read(into)
    total = [vector.clone().double() for vector in own]
    for vector in total:
        comm.all_reduce(vector)
    for flat, vector, weights in zip(replica.flats, total, into, strict=True):
        expected = torch.where(flat.weights == 0, 0.0, 1.0 + sum(range(comm.size))).double()
        # Each exchange rounds two numbers, of which none is above the number of ranks.
        roundings = 2 * 20 * comm.size
        bound = roundings * comm.size * torch.finfo(weights.dtype).eps / 2
        assert torch.allclose(vector + weights.double(), expected, rtol=0, atol=bound)


def check_every_gradient_is_applied(comm: Communicator) -> None:
    replica, _ = join(comm)
    optimizer = optim.SGD(replica.module.parameters(), lr=0.5)
    grads = [flat.grads for flat in replica.flats]
    centre = SharedCentre(comm, replica.flats, OptimizerRule(optimizer, replica, grads), 3)
    weights = [flat.weights for flat in replica.flats]
    for _ in range(4):
        for flat in replica.flats:
            for span in flat.spans:
                flat.grads[span] = 1.0
        centre.exchange(grads, weights)
    centre.read(weights)
    assert values(weights) == {1.0 - 0.5 * 4 * comm.size}


CHECKS = [check_a_push_moves_every_slot_once, check_exchanges_lose_nothing, check_every_gradient_is_applied]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("size", [1, 2, 5])
def test_on_virtual_ranks(check: object, size: int) -> None:
    VirtualWorld(size).run(check)


def test_on_processes() -> None:
    with World(3) as world:
        for check in CHECKS:
            world.run(check)


@pytest.mark.parametrize("name", ["Adam", "Adagrad", "NAdam", "Adafactor", "Muon"])
def test_cutting_into_slots_changes_nothing(name: str) -> None:
    if not hasattr(optim, name):
        pytest.skip(f"this torch has no {name}")

    def train(comm: Communicator, parts: int) -> Tensor:
        module = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4))).double()
        for number, parameter in enumerate(module.parameters()):
            with torch.no_grad():
                parameter.copy_(torch.randn(8, 8, generator=torch.Generator().manual_seed(number)))
        replica = place(module, comm, WeightPlacement.PRIVATE)
        optimizer = getattr(optim, name)(module.parameters(), lr=0.1)
        grads = [flat.grads for flat in replica.flats]
        centre = SharedCentre(comm, replica.flats, OptimizerRule(optimizer, replica, grads), parts)
        assert len(centre.slots) == parts
        for step in range(5):
            generator = torch.Generator().manual_seed(10 * step + comm.rank)
            grads[0].copy_(torch.randn(len(grads[0]), generator=generator))
            comm.compute(1.0 + 0.1 * comm.rank)
            centre.exchange(grads, [replica.flats[0].weights])
        centre.read([replica.flats[0].weights])
        return replica.flats[0].weights.clone()

    one, four = [VirtualWorld(2).run(train, parts)[0] for parts in (1, 4)]
    # Muon computes in bfloat16.
    torch.testing.assert_close(one, four, rtol=2e-3 if name == "Muon" else 0, atol=1e-12)


def test_staleness_is_what_others_did_since_the_last_reading() -> None:
    def train(comm: Communicator) -> list[int | None]:
        replica, centre = join(comm)
        found = []
        for _ in range(3):
            comm.compute((1.0, 0.4)[comm.rank])
            found.append(centre.exchange(vectors(replica, 0.0)).staleness)
        found.append(centre.pull(vectors(replica, 0.0)).staleness)
        return found

    # Worker 1 is there at 0.4, 0.8 and 1.2 s, worker 0 at 1, 2 and 3 s.
    first, second = VirtualWorld(2).run(train)
    assert first == [2, 1, 0, 0]
    assert second == [0, 0, 1, 0]


def test_a_push_counts_what_others_did_but_not_its_own() -> None:
    def train(comm: Communicator) -> list[int | None]:
        replica, centre = join(comm)
        comm.compute(comm.rank * 0.5)
        found = []
        for _ in range(3):
            comm.compute(1.0)
            found.append(centre.push(vectors(replica, 0.0)).staleness)
        return found

    first, second = VirtualWorld(2).run(train)
    assert (first, second) == ([0, 1, 2], [1, 2, 3])


def test_a_reading_leaves_no_trace_on_the_staleness() -> None:
    def train(comm: Communicator) -> int | None:
        replica, centre = join(comm)
        if comm.rank:
            centre.push(vectors(replica, 0.0))
        centre.read(vectors(replica, 0.0))
        comm.barrier()
        return centre.push(vectors(replica, 0.0)).staleness if comm.rank == 0 else None

    assert VirtualWorld(2).run(train)[0] == 1


@pytest.mark.parametrize("operation", range(12, 40, 3))
def test_a_dead_worker_leaves_no_other_waiting(operation: int) -> None:
    def train(comm: Communicator) -> bool:
        try:
            replica, centre = join(comm, ElasticRule(0.9, comm.size), 2)
            for _ in range(20):
                centre.exchange(vectors(replica, 0.0))
                comm.compute(1.0)
                centre.tick(0, vectors(replica, 0.0))
            centre.leave()
            centre.read(vectors(replica, 0.0))
        except PeerLost:
            return True
        return False

    found = VirtualWorld(3, faults=[Fault(1, operation=operation)]).run(train)
    assert found[0]
    assert found[2]
