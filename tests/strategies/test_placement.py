"""Where a placed model lies, and whose values it has."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tutti.comm.base import Communicator
from tutti.comm.virtual.communicator import VirtualCommunicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadModel
from tutti.strategies import WeightPlacement
from tutti.strategies.placement import place, visible_memory


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


def state(comm: Communicator, home: WeightPlacement) -> dict[str, Tensor]:
    module = Mixed(value=comm.rank + 1)
    place(module, comm, home)
    return {name: value.clone() for name, value in module.state_dict().items()}


@pytest.mark.parametrize("home", list(WeightPlacement))
@pytest.mark.parametrize("hosts", [1, 2, 3, (2, 3), (1, 2), (1, 1)], ids=str)
def test_ranks_begin_with_the_values_of_rank_0(home: WeightPlacement, hosts: int | tuple[int, ...]) -> None:
    world = VirtualWorld(hosts) if isinstance(hosts, int) else VirtualWorld(sum(hosts), hosts)
    for found in world.run(state, home):
        for name, value in found.items():
            assert torch.equal(value, torch.ones_like(value)), name


def test_shared_weights_are_one_memory_per_host() -> None:
    def pointers(comm: Communicator) -> tuple[int, int, int]:
        flat = place(Mixed(0), comm, WeightPlacement.SHARED).flats[0]
        return flat.weights.data_ptr(), flat.rows.data_ptr(), flat.grads.data_ptr()

    weights, rows, grads = zip(*VirtualWorld(5, (2, 3)).run(pointers), strict=True)
    assert [weights.index(pointer) for pointer in weights] == [0, 0, 2, 2, 2]
    assert [rows.index(pointer) for pointer in rows] == [0, 0, 2, 2, 2]
    assert len(set(grads)) == 5


def test_private_weights_are_each_ranks_own() -> None:
    def keep(comm: Communicator) -> Tensor:
        return place(Mixed(0), comm, WeightPlacement.PRIVATE).flats[0].weights

    weights = VirtualWorld(3).run(keep)
    assert len({vector.data_ptr() for vector in weights}) == 3


def test_models_that_differ_are_refused_on_every_rank() -> None:
    refused = []

    def differ(comm: Communicator) -> None:
        with pytest.raises(
            BadModel, match=r"linear.weight \(2, 3\).* where rank 2 has linear.weight \(2, 4\)"
        ):
            place(Mixed(0, width=4 if comm.rank == 2 else 3), comm, WeightPlacement.SHARED)
        refused.append(comm.rank)

    VirtualWorld(3).run(differ)
    assert sorted(refused) == [0, 1, 2]


@pytest.mark.parametrize("home", list(WeightPlacement))
def test_a_rank_alone_needs_no_communicator(home: WeightPlacement, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its model may lie where that cannot reach: on a GPU."""

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the communicator was used")

    for name in ("shared", "broadcast"):
        monkeypatch.setattr(VirtualCommunicator, name, refuse)
    (found,) = VirtualWorld(1).run(state, home)
    assert torch.equal(found["linear.weight"], torch.ones(2, 3))


@pytest.mark.parametrize("frozen", [False, True])
def test_frozen_parameters_are_laid_out_where_that_is_asked_for(frozen: bool) -> None:
    def names(comm: Communicator, *frozen: bool) -> list[str]:
        replica = place(Mixed(0), comm, WeightPlacement.PRIVATE, None, *frozen)
        return [name for flat in replica.flats for name in flat.names]

    assert ("frozen" in VirtualWorld(1).run(names, frozen)[0]) == frozen
    assert "frozen" not in VirtualWorld(1).run(names)[0]


def test_each_rank_has_its_own_weights_visible_on_its_host() -> None:
    def look(comm: Communicator) -> tuple[list[list[float]], list[list[float]]]:
        memory, copies = visible_memory(comm)
        replica = place(Mixed(0), comm, WeightPlacement.PRIVATE, memory)
        assert len(copies) == len(replica.flats)
        for flat, seen in zip(replica.flats, copies, strict=True):
            assert flat.weights.data_ptr() == seen[comm.node.rank].data_ptr()
            flat.weights.fill_(comm.rank)
            flat.grads.fill_(10 + comm.rank)
        comm.barrier()
        first = replica.flats[0]
        return [w.unique().tolist() for w in copies[0]], [row.unique().tolist() for row in first.rows]

    found = VirtualWorld(5, (2, 3)).run(look)
    assert found[:2] == [([[0.0], [1.0]], [[10.0], [11.0]])] * 2
    assert found[2:] == [([[2.0], [3.0], [4.0]], [[12.0], [13.0], [14.0]])] * 3


def test_expanded_tensors_are_not_written_to() -> None:
    def program(comm: Communicator) -> list[int]:
        module = nn.Linear(2, 2)
        module.register_buffer("ids", torch.full((1,), 3).expand(4))
        module.scale = nn.Parameter(torch.ones(1).expand(2), requires_grad=False)
        place(module, comm, WeightPlacement.SHARED)
        return module.ids.tolist()

    assert VirtualWorld(2).run(program) == [[3] * 4] * 2
