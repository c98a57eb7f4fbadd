"""The weights of the best epoch, with any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.states import saved_by
from tests.training.test_stopping import record
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.records.run import EpochRecord
from tutti.replica import Replica
from tutti.state import State
from tutti.strategies.base import WeightPlacement
from tutti.strategies.placement import place
from tutti.training.best_weights import BestWeights
from tutti.training.stopping import Monitor

MONITOR = Monitor()

LOSSES = [0.9, 0.4, 0.6, 0.4, 0.7]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2).double())


def set_to(replica: Replica, epoch: int) -> None:
    """Weights and buffers that tell of the epoch, and differ from each other."""
    values = [*replica.module.parameters(), *replica.module.buffers()]
    with torch.no_grad():
        for number, value in enumerate(values):
            value.copy_(torch.arange(value.numel()).view(value.shape) + 1000 * epoch + 100 * number)


def seen(replica: Replica) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in replica.module.state_dict().items()}


def expected(epoch: int) -> dict[str, Tensor]:
    replica = Replica(model())
    set_to(replica, epoch)
    return seen(replica)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, found[name]) for name, value in wanted.items())


def history(count: int = len(LOSSES)) -> list[EpochRecord]:
    return [record(epoch, loss) for epoch, loss in enumerate(LOSSES[:count], start=1)]


@pytest.mark.parametrize("home", WeightPlacement)
@pytest.mark.parametrize("late", [0, 1, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_replicas_get_the_weights_of_the_best_epoch(ranks: int, late: int, home: WeightPlacement) -> None:
    def trained(comm: Communicator) -> tuple[int, dict[str, Tensor]]:
        replica = place(model(), comm, home)
        best = BestWeights(replica, comm, MONITOR)
        for epoch in range(1, len(LOSSES) + 1):
            set_to(replica, epoch)
            comm.barrier()
            best.keep(epoch)
            best.note(history(max(0, epoch - late)))
            assert len(best._kept) <= 1 + late
        restored = best.restore(history())
        comm.barrier()
        assert restored is not None
        return restored.epoch, seen(replica)

    for epoch, found in VirtualWorld(ranks).run(trained):
        assert epoch == 2
        assert same(found, expected(2))


@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 1), (1, 3), (3, 2)])
def test_it_goes_on_with_any_number_of_ranks(before: int, after: int) -> None:
    def first(comm: Communicator) -> State:
        replica = place(model(), comm, WeightPlacement.PRIVATE)
        best = BestWeights(replica, comm, MONITOR)
        for epoch in range(1, 5):
            set_to(replica, epoch)
            best.keep(epoch)
        best.note(history(3))
        state = best.state()
        comm.barrier()
        return state

    states = VirtualWorld(before).run(first)
    assert {piece.name.split("/")[1] for state in states for piece in state.joint.pieces} == {"2", "4"}
    saved = saved_by(states, after)

    def second(comm: Communicator) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        replica = place(model(), comm, WeightPlacement.PRIVATE)
        best = BestWeights(replica, comm, MONITOR)
        best.load_state(saved[comm.rank])
        set_to(replica, 5)
        best.keep(5)
        best.restore(history())
        found = seen(replica)
        # A run that goes on by another rule may find another epoch the best: of those that are kept.
        best.restore([record(epoch, 1 / epoch) for epoch in range(1, 5)])
        return found, seen(replica)

    for found, other in VirtualWorld(after).run(second):
        assert same(found, expected(2))
        assert same(other, expected(4))


class Teacher(nn.Linear):
    """A layer with an extra state."""

    def get_extra_state(self) -> Any:
        return {"seen": self.seen}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]


def test_a_module_has_the_extra_state_of_the_best_epoch_again() -> None:
    def trained(comm: Communicator) -> int:
        module = Teacher(3, 2)
        replica = place(module, comm, WeightPlacement.PRIVATE)
        best = BestWeights(replica, comm, MONITOR)
        for epoch in range(1, len(LOSSES) + 1):
            module.seen = epoch
            best.keep(epoch)
        best.restore(history())
        return module.seen

    assert VirtualWorld(2).run(trained) == [2, 2]
