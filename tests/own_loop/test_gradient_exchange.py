"""Gradients become those of all ranks as `backward()` ends, in numbers worked by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualCommunicator, VirtualWorld
from tutti.errors import BadModel
from tutti.own_loop.gradient_exchange import GradientExchange
from tutti.strategies.base import WeightPlacement
from tutti.strategies.placement import place

LENGTHS = (40, 20, 50)


def exchanged(module: nn.Module, comm: Communicator) -> nn.Module:
    replica = place(module, comm, WeightPlacement.SHARED)
    exchange = GradientExchange(comm)
    exchange.add(replica)
    for parameter in module.parameters():
        parameter.grad = None
    return module


def vectors(comm: Communicator) -> list[nn.Parameter]:
    module = nn.ParameterList(nn.Parameter(torch.zeros(n, dtype=torch.float64)) for n in LENGTHS)
    return list(exchanged(module, comm).parameters())


def gradient(number: int, factor: float) -> Tensor:
    """Of one parameter: the mean over ranks is that of the mean factor."""
    return factor * (torch.arange(LENGTHS[number], dtype=torch.float64) + 100 * number)


@pytest.mark.parametrize("hosts", [(3,), (2, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("numbers", [(0, 1, 2), (0, 2), (1,)], ids=str)
def test_gradients_become_the_mean_and_add_up(numbers: tuple[int, ...], hosts: tuple[int, ...]) -> None:
    def program(comm: Communicator) -> None:
        parameters = vectors(comm)
        for turn in (1, 2):
            factors = [3.0 * (1 + comm.rank) if n in numbers or comm.rank == 0 else 0.0 for n in range(3)]
            used = [n for n in range(3) if factors[n]]  # only rank 0 uses the other parameters
            torch.autograd.backward([parameters[n] for n in used], [gradient(n, factors[n]) for n in used])
            for number, parameter in enumerate(parameters):
                mean = 6.0 if number in numbers else 1.0
                assert parameter.grad is not None
                wanted = gradient(number, turn * mean)
                torch.testing.assert_close(parameter.grad, wanted, rtol=1e-12, atol=0)

    VirtualWorld(3, hosts).run(program)


def test_a_parameter_that_was_converted_is_refused() -> None:
    def program(comm: Communicator) -> None:
        _, second, _ = vectors(comm)
        second.data = second.data.float()
        with pytest.raises(BadModel, match=r"\(20,\) was converted from torch.float64 to torch.float32"):
            second.sum().backward()

    VirtualWorld(2).run(program)


def test_a_slice_is_one_message_across_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tutti.own_loop.gradient_exchange.PIECE", 16)
    lengths: list[int] = []
    own = VirtualCommunicator.all_reduce

    def noted(comm: VirtualCommunicator, vector: Tensor, *rest: object) -> object:
        lengths.append(len(vector))
        return own(comm, vector, *rest)

    monkeypatch.setattr(VirtualCommunicator, "all_reduce", noted)

    def program(comm: Communicator) -> None:
        sum(parameter.sum() for parameter in vectors(comm)).backward()  # type: ignore[union-attr]

    VirtualWorld(2, (1, 1)).run(program)
    assert lengths == [144, 144]


@pytest.mark.parametrize("hosts", [(3,), (2, 1)], ids=str)
def test_the_touched_rows_of_a_table_are_averaged(hosts: tuple[int, ...]) -> None:
    def program(comm: Communicator) -> None:
        module = exchanged(nn.Embedding(6, 2, sparse=True, dtype=torch.float64), comm)
        rows, factors = ([4, 1, 4], [1.0, 3.0, 5.0]) if comm.rank == 0 else ([1], [9.0])
        (module(torch.tensor(rows)) * torch.tensor(factors)[:, None]).sum().backward()
        found = module.weight.grad.coalesce()
        assert found.indices().tolist() == [[1, 4]]
        wanted = torch.tensor([[21.0, 21.0], [6.0, 6.0]], dtype=torch.float64) / 3
        torch.testing.assert_close(found.values(), wanted, rtol=1e-12, atol=0)

    VirtualWorld(3, hosts).run(program)
