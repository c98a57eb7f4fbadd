"""Gradients of a user's own loop become those of all ranks, in numbers worked by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tutti.allreduce.exact import Native
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualCommunicator, VirtualWorld
from tutti.errors import BadModel
from tutti.strategies import joint_gradients
from tutti.strategies.base import Home
from tutti.strategies.joint_gradients import (
    Incoming,
    JointGradients,
    MeanGradients,
    ReducedGradients,
)
from tutti.strategies.placement import place, visible_memory

LENGTHS = (40, 20, 50)
HOSTS = [(3,), (2, 1), (1, 1, 1)]


def vectors() -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.zeros(length, dtype=torch.float64)) for length in LENGTHS])


def gradient(number: int, factor: float) -> Tensor:
    """Of one parameter: the mean over ranks is that of the mean factor."""
    return factor * (torch.arange(LENGTHS[number], dtype=torch.float64) + 100 * number)


def joint(comm: Communicator) -> tuple[nn.ParameterList, MeanGradients]:
    module = vectors()
    return module, MeanGradients(place(module, comm, Home.SHARED), comm)


def exchange(comm: Communicator, gradients: MeanGradients | ReducedGradients, numbers: list[int]) -> None:
    gradients.bring(numbers)
    comm.barrier()
    gradients.reduce(numbers)


@pytest.mark.parametrize("hosts", HOSTS, ids=str)
@pytest.mark.parametrize("numbers", [[0, 1, 2], [0, 2], [1]], ids=str)
def test_gradients_that_are_exchanged_become_the_mean_and_others_stay(
    numbers: list[int], hosts: tuple[int, ...]
) -> None:
    def program(comm: Communicator) -> None:
        module, gradients = joint(comm)
        for turn in (1.0, 2.0):
            for number, parameter in enumerate(module):
                parameter.grad = gradient(number, turn * 3 * (1 + comm.rank))
            exchange(comm, gradients, numbers)
            for number, parameter in enumerate(module):
                factor = turn * (6 if number in numbers else 3 * (1 + comm.rank))
                assert parameter.grad is not None
                torch.testing.assert_close(parameter.grad, gradient(number, factor), rtol=1e-12, atol=0)

    VirtualWorld(3, hosts).run(program)


def test_a_rank_without_a_gradient_brings_zeros() -> None:
    def program(comm: Communicator) -> None:
        module, gradients = joint(comm)
        gradients.flats[0].grads.fill_(9.0)
        module[1].grad = None if comm.rank else gradient(1, 2.0)
        exchange(comm, gradients, [1])
        assert torch.equal(module[1].grad, gradient(1, 1.0))

    VirtualWorld(2).run(program)


def test_a_gradient_that_lies_in_its_row_is_added_to_in_place() -> None:
    def program(comm: Communicator) -> None:
        module, gradients = joint(comm)
        module[0].grad = gradient(0, 2.0 * comm.rank)
        exchange(comm, gradients, [0])
        held = module[0].grad
        module[0].grad += gradient(0, 2.0 * comm.rank)
        exchange(comm, gradients, [0])
        assert module[0].grad is held
        assert gradients.cells[0].holds(held)
        assert torch.equal(held, gradient(0, 2.0))

    VirtualWorld(2).run(program)


def test_a_gradient_that_the_loop_keeps_is_not_overwritten_by_the_next() -> None:
    def program(comm: Communicator) -> None:
        module, gradients = joint(comm)
        module[0].grad = gradient(0, 1.0)
        exchange(comm, gradients, [0])
        kept = module[0].grad
        module[0].grad = gradient(0, 5.0)
        exchange(comm, gradients, [0])
        assert torch.equal(kept, gradient(0, 1.0))
        assert torch.equal(module[0].grad, gradient(0, 5.0))

    VirtualWorld(2).run(program)


def unseen(gradients: JointGradients) -> list[int]:
    found = gradients.unseen()
    return [number for number, cell in enumerate(gradients.cells) if any(cell is one for one in found)]


def test_what_the_loop_has_set_itself_is_found() -> None:
    def program(comm: Communicator) -> None:
        module, gradients = joint(comm)
        for parameter in module:
            parameter.grad = None
        assert unseen(gradients) == []
        module[0].grad, module[2].grad = gradient(0, 1.0), gradient(2, 1.0)
        assert unseen(gradients) == [0, 2]
        exchange(comm, gradients, [0])
        assert unseen(gradients) == [2]

    VirtualWorld(2).run(program)


def test_a_parameter_that_was_converted_is_refused() -> None:
    def program(comm: Communicator) -> None:
        module, gradients = joint(comm)
        module[1].data = module[1].data.float()
        module[1].grad = None
        with pytest.raises(
            BadModel, match=r"shape \(20,\) was converted from torch.float64 to torch.float32"
        ):
            gradients.bring([1])

    VirtualWorld(2).run(program)


def test_gradients_behind_one_that_lies_in_its_row_are_brought_too() -> None:
    def program(comm: Communicator) -> None:
        module, gradients = joint(comm)
        module[0].grad = gradient(0, 2.0 * comm.rank)
        exchange(comm, gradients, [0])
        module[1].grad = gradient(1, 2.0 * comm.rank)
        exchange(comm, gradients, [0, 1])
        assert torch.equal(module[1].grad, gradient(1, 1.0))

    VirtualWorld(2).run(program)


def test_a_gradient_of_rows_of_what_is_no_table_becomes_a_whole_one() -> None:
    def program(comm: Communicator) -> None:
        module, gradients = joint(comm)
        module[0].grad = gradient(0, 2.0 * comm.rank).to_sparse()
        exchange(comm, gradients, [0])
        assert torch.equal(module[0].grad, gradient(0, 1.0))
        reduced = ReducedGradients(place(vectors(), comm, Home.PRIVATE), comm, Native, between=False)
        reduced.incoming[0] = Incoming(gradient(0, 2.0 * comm.rank).to_sparse(), None)
        exchange(comm, reduced, [0])
        assert torch.equal(reduced.cells[0].parameter.grad, gradient(0, 1.0))

    VirtualWorld(2).run(program)


def test_a_slice_is_one_message_across_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint_gradients, "PIECE", 16)
    lengths = []
    own = VirtualCommunicator.all_reduce

    def noted(comm: VirtualCommunicator, vector: Tensor, *rest: object) -> object:
        lengths.append(len(vector))
        return own(comm, vector, *rest)

    monkeypatch.setattr(VirtualCommunicator, "all_reduce", noted)

    def program(comm: Communicator) -> None:
        module, gradients = joint(comm)
        for number, parameter in enumerate(module):
            parameter.grad = gradient(number, 2.0 * comm.rank)
        lengths.clear()
        exchange(comm, gradients, [0, 1, 2])
        assert torch.equal(module[2].grad, gradient(2, 1.0))

    VirtualWorld(2, (1, 1)).run(program)
    assert lengths == [144, 144]


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(6, 2, sparse=True, dtype=torch.float64)


@pytest.mark.parametrize("hosts", [(3,), (2, 1)], ids=str)
def test_the_touched_rows_of_a_table_are_averaged(hosts: tuple[int, ...]) -> None:
    def program(comm: Communicator) -> None:
        module = Words()
        gradients = MeanGradients(place(module, comm, Home.SHARED), comm)
        weight = module.table.weight
        weight.grad = None
        if comm.rank == 0:
            weight.grad = torch.sparse_coo_tensor(
                [[4, 1, 4]],
                torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]).double(),
                (6, 2),
                check_invariants=True,
            )
        elif comm.rank == 1:
            weight.grad = torch.zeros(6, 2, dtype=torch.float64)
            weight.grad[1] = 9.0
        exchange(comm, gradients, [0])
        assert weight.grad.coalesce().indices().tolist() == [[1, 4]]
        expected = torch.tensor([[12.0, 13.0], [6.0, 8.0]]).double() / 3
        torch.testing.assert_close(weight.grad.coalesce().values(), expected, rtol=1e-12, atol=0)

    VirtualWorld(3, hosts).run(program)


@pytest.mark.parametrize(
    ("hosts", "between"), [((3,), False), ((2, 1), False), ((1, 1, 1), True), ((2, 1), True), ((2, 2), True)]
)
def test_what_a_reduction_makes_is_added_to_what_was_there(hosts: tuple[int, ...], between: bool) -> None:
    ranks = sum(hosts)
    mean = 3 * (1 + ranks) / 2

    def program(comm: Communicator) -> None:
        module = vectors()
        home = Home.SHARED if between else Home.PRIVATE
        gradients = ReducedGradients(place(module, comm, home), comm, Native, between)
        for turn in (1.0, 2.0):
            before = gradient(0, 7.0)
            module[1].grad = None
            module[2].grad = gradient(2, 0.5)
            for number, earlier in ((0, before), (1, None)):
                new = gradient(number, turn * 3 * (1 + comm.rank))
                gradients.incoming[number] = Incoming(new, earlier)
            exchange(comm, gradients, [0, 1])
            assert module[0].grad is not None
            assert module[1].grad is not None
            torch.testing.assert_close(module[0].grad, gradient(0, 7 + turn * mean), rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(module[1].grad, gradient(1, turn * mean), rtol=1e-12, atol=1e-12)
            assert torch.equal(module[2].grad, gradient(2, 0.5))
            assert torch.equal(before, gradient(0, 7.0))
            assert not gradients.incoming
            assert not gradients.flats[0].grads.any()

    VirtualWorld(ranks, hosts).run(program)


def test_a_reduction_over_all_ranks_adds_no_row_of_another() -> None:
    def program(comm: Communicator) -> None:
        module = vectors()
        memory, _ = visible_memory(comm)
        replica = place(module, comm, Home.PRIVATE, memory)
        gradients = ReducedGradients(replica, comm, Native, between=False)
        gradients.incoming[0] = Incoming(gradient(0, 2.0 * comm.rank), None)
        exchange(comm, gradients, [0])
        assert torch.equal(module[0].grad, gradient(0, 1.0))

    VirtualWorld(2).run(program)


def test_what_a_reduction_has_made_is_not_what_the_loop_has_set() -> None:
    def program(comm: Communicator) -> None:
        module = vectors()
        gradients = ReducedGradients(place(module, comm, Home.PRIVATE), comm, Native, between=False)
        for parameter in module:
            parameter.grad = None
        gradients.incoming[0] = Incoming(gradient(0, 2.0), None)
        exchange(comm, gradients, [0])
        assert unseen(gradients) == []
        module[2].grad = gradient(2, 1.0)
        assert unseen(gradients) == [2]
        module[0].grad = module[0].grad.clone()
        assert unseen(gradients) == [0, 2]

    VirtualWorld(2).run(program)
