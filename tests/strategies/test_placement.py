"""Where a placed model lies, and whose values it has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tutti.comm.base import Communicator
from tutti.comm.virtual import VirtualWorld
from tutti.errors import BadModel
from tutti.strategies import Home
from tutti.strategies.placement import place


class Mixed(nn.Module):
    """A model with everything that has to be the same on all ranks."""

    def __init__(self, value: int, width: int = 3) -> None:
        super().__init__()
        self.linear = nn.Linear(width, 2)
        self.norm = nn.BatchNorm1d(2)
        self.precise = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        self.frozen = nn.Parameter(torch.zeros(2, 3), requires_grad=False)
        self.register_buffer("mask", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("image", torch.zeros(1, 2, 2, 2).to(memory_format=torch.channels_last))
        self.register_buffer("nothing", torch.zeros(0))
        with torch.no_grad():
            for tensor in [*self.parameters(), *self.buffers()]:
                tensor.fill_(value)


def state(comm: Communicator, home: Home) -> dict[str, Tensor]:
    module = Mixed(value=comm.rank + 1)
    place(module, comm, home)
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("home", list(Home))
@pytest.mark.parametrize("hosts", [1, 3, (2, 3)], ids=str)
def test_every_rank_begins_with_the_values_of_rank_0(home: Home, hosts: int | tuple[int, ...]) -> None:
    world = VirtualWorld(hosts) if isinstance(hosts, int) else VirtualWorld(sum(hosts), hosts)
    for found in world.run(state, home):
        for name, value in found.items():
            assert torch.equal(value, torch.ones_like(value)), name


def test_shared_weights_are_one_memory_per_host() -> None:
    def pointers(comm: Communicator) -> tuple[int, int, int]:
        flat = place(Mixed(0), comm, Home.SHARED).flats[0]
        return flat.weights.data_ptr(), flat.rows.data_ptr(), flat.grads.data_ptr()

    weights, rows, grads = zip(*VirtualWorld(5, (2, 3)).run(pointers), strict=True)
    assert [weights.index(pointer) for pointer in weights] == [0, 0, 2, 2, 2]
    assert [rows.index(pointer) for pointer in rows] == [0, 0, 2, 2, 2]
    assert len(set(grads)) == 5


def test_private_weights_are_each_ranks_own() -> None:
    def keep(comm: Communicator) -> Tensor:
        return place(Mixed(0), comm, Home.PRIVATE).flats[0].weights

    weights = VirtualWorld(3).run(keep)
    assert len({vector.data_ptr() for vector in weights}) == 3


def test_a_gradient_from_before_is_forgotten() -> None:
    def gradient(comm: Communicator) -> Tensor:
        module = Mixed(0)
        module.linear.weight.grad = torch.ones(2, 3)
        return place(module, comm, Home.SHARED).flats[0].rows

    assert not VirtualWorld(2).run(gradient)[0].any()


def test_models_that_differ_are_refused_on_every_rank() -> None:
    refused = []

    def differ(comm: Communicator) -> None:
        with pytest.raises(
            BadModel, match=r"linear.weight \(2, 3\).* where rank 2 has linear.weight \(2, 4\)"
        ):
            place(Mixed(0, width=4 if comm.rank == 2 else 3), comm, Home.SHARED)
        refused.append(comm.rank)

    VirtualWorld(3).run(differ)
    assert sorted(refused) == [0, 1, 2]


def test_a_lazy_model_is_refused() -> None:
    with pytest.raises(BadModel, match="'weight' of the model is lazy"):
        VirtualWorld(1).run(lambda comm: place(nn.LazyLinear(2), comm, Home.SHARED))
