"""A user's own loop with strategies whose workers have batches of their own, on virtual ranks."""

from __future__ import annotations

import greenlet
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from tests.run.strategies import Alone, Free
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption
from tutti.own_loop import distribute
from tutti.own_loop.loop import OwnLoop
from tutti.strategies import Strategy, Sync

SAMPLES = TensorDataset(torch.randn(23, 5, generator=torch.Generator().manual_seed(1)), torch.arange(23) % 3)
BATCH = 4
"""23 samples: six batches, so that four ranks have one round of them, and two are left."""


@pytest.fixture(autouse=True)
def job_of_each_rank(monkeypatch: pytest.MonkeyPatch) -> dict[object, OwnLoop]:
    """Each greenlet sees its own job."""
    jobs: dict[object, OwnLoop] = {}
    monkeypatch.setattr(distribute, "_current", lambda: jobs[greenlet.getcurrent()])
    monkeypatch.setattr(distribute, "init", lambda: jobs[greenlet.getcurrent()].comm)
    return jobs


def make(strategy: Strategy | None = None) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(3)
    model = nn.Linear(5, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if strategy is not None:
        model, optimizer = distribute.distribute(model, optimizer, strategy)
    return model, optimizer


def train(model: nn.Module, optimizer: Optimizer, batches) -> list[Tensor]:
    """One epoch; returns the targets that were seen."""
    seen = []
    for inputs, targets in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs.double()), targets).backward()
        optimizer.step()
        seen.append(inputs)
    return seen


def vector(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def loader(shuffle: bool = False) -> DataLoader:
    return DataLoader(SAMPLES, BATCH, shuffle=shuffle, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("strategy", [Alone(), Free()])
@pytest.mark.parametrize("from_loader", [True, False])
def test_each_rank_trains_on_whole_batches_in_turn(job_of_each_rank, strategy, from_loader) -> None:
    def work(comm: Communicator) -> tuple[list[Tensor], list[str], Tensor]:
        job_of_each_rank[greenlet.getcurrent()] = OwnLoop(comm)
        model, optimizer = make(strategy)
        dealt = distribute.shard(loader() if from_loader else list(loader()))
        assert len(dealt) == 1
        seen = train(model, optimizer, dealt)
        distribute.finish(model)
        return seen, distribute._current().steppers[0].worker.calls, vector(model)

    found = VirtualWorld(4).run(work)
    assert [calls for _, calls, _ in found] == [["step"]] * 4
    ends = []
    for rank, (seen, _, _) in enumerate(found):
        model, optimizer = make()
        expected = [batch for number, batch in enumerate(loader()) if number % 4 == rank][:1]
        train(model, optimizer, expected)
        ends.append(vector(model))
        assert all(map(torch.equal, seen, [inputs for inputs, _ in expected]))
    for _, _, weights in found:
        torch.testing.assert_close(weights, torch.stack(ends).mean(0))


def test_settled_weights_are_the_same_everywhere_and_training_goes_on_from_the_own(job_of_each_rank) -> None:
    def work(comm: Communicator) -> tuple[Tensor, Tensor, Tensor]:
        job_of_each_rank[greenlet.getcurrent()] = OwnLoop(comm)
        model, optimizer = make(Alone())
        train(model, optimizer, distribute.shard(loader()))
        before = vector(model)
        with distribute.settled(model):
            settled = vector(model)
        return before, settled, vector(model)

    first, second = VirtualWorld(2).run(work)
    assert not torch.equal(first[0], second[0])
    assert torch.equal(first[1], second[1])
    for before, _, after in (first, second):
        assert torch.equal(before, after)


def test_evaluation_without_gradients_skips_nothing(job_of_each_rank) -> None:
    def work(comm: Communicator) -> tuple[int, list[str]]:
        job_of_each_rank[greenlet.getcurrent()] = OwnLoop(comm)
        make(Alone())
        with torch.no_grad():
            samples = sum(len(inputs) for inputs, _ in distribute.shard(loader()))
        return samples, distribute._current().steppers[0].worker.calls

    assert VirtualWorld(4).run(work) == [(8, []), (7, []), (4, []), (4, [])]


def test_two_models_at_two_paces_are_refused(job_of_each_rank) -> None:
    def work(comm: Communicator) -> None:
        job_of_each_rank[greenlet.getcurrent()] = OwnLoop(comm)
        make(Alone())
        second = nn.Linear(5, 3)
        distribute.distribute(second, torch.optim.SGD(second.parameters()), Sync())

    with pytest.raises(BadOption, match=r"strategy 'sync' .* cannot train beside that of the first model"):
        VirtualWorld(1).run(work)


def test_a_model_that_is_not_trained_here_is_refused(job_of_each_rank) -> None:
    def work(comm: Communicator) -> None:
        job_of_each_rank[greenlet.getcurrent()] = OwnLoop(comm)
        distribute.finish(nn.Linear(5, 3))

    with pytest.raises(BadOption, match=r"give it to distribute\(\) first"):
        VirtualWorld(1).run(work)


def test_fewer_batches_than_workers_are_refused(job_of_each_rank) -> None:
    def work(comm: Communicator) -> None:
        job_of_each_rank[greenlet.getcurrent()] = OwnLoop(comm)
        train(*make(Alone()), distribute.shard(list(loader())[:3]))

    with pytest.raises(BadOption, match="fewer batches than the 4 ranks"):
        VirtualWorld(4).run(work)


def test_workers_that_wait_for_nobody_may_step_as_often_as_they_like(job_of_each_rank) -> None:
    def work(comm: Communicator) -> list[str]:
        job_of_each_rank[greenlet.getcurrent()] = OwnLoop(comm)
        model, optimizer = make(Free())
        for batch in distribute.shard(loader()):
            train(model, optimizer, [batch, batch])
        return distribute._current().steppers[0].worker.calls

    assert VirtualWorld(4).run(work) == [["step"] * 2] * 4
