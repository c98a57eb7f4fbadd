"""A user's own loop with strategies whose workers have batches of their own, on virtual ranks."""

from __future__ import annotations

from itertools import chain

import greenlet
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, TensorDataset

from tests.run.strategies import Alone, Free, Together
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption
from tutti.own_loop import distribute
from tutti.own_loop.loop import OwnLoop
from tutti.own_loop.origins import SampleCounts
from tutti.strategies import Strategy, Sync

SAMPLES = TensorDataset(torch.randn(23, 5, generator=torch.Generator().manual_seed(1)), torch.arange(23) % 3)
BATCH = 4
"""23 samples: six batches, so that of four ranks two have none in the second round."""


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
        job_of_each_rank[greenlet.getcurrent()] = OwnLoop(comm, SampleCounts(1, comm.size))
        model, optimizer = make(strategy)
        dealt = distribute.shard(loader() if from_loader else list(loader()))
        assert len(dealt) == [2, 2, 1, 1][comm.rank]
        seen = train(model, optimizer, dealt)
        distribute.finish(model)
        return seen, distribute._current().steppers[0].worker.calls, vector(model)

    found = VirtualWorld(4).run(work)
    assert [calls for _, calls, _ in found] == [["step", "step"]] * 2 + [["step", "skip"]] * 2
    ends = []
    for rank, (seen, _, _) in enumerate(found):
        model, optimizer = make()
        expected = [batch for number, batch in enumerate(loader()) if number % 4 == rank]
        train(model, optimizer, expected)
        ends.append(vector(model))
        assert all(map(torch.equal, seen, [inputs for inputs, _ in expected]))
    for _, _, weights in found:
        torch.testing.assert_close(weights, torch.stack(ends).mean(0))


def test_one_backward_may_be_of_whole_batches_of_two_loaders(job_of_each_rank) -> None:
    def epoch(model: nn.Module, optimizer: Optimizer, pairs) -> Tensor:
        for (inputs, targets), (more, others) in pairs:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), targets)
            (loss + nn.functional.cross_entropy(model(more), others)).backward()
            optimizer.step()
        return vector(model)

    doubles = TensorDataset(SAMPLES.tensors[0].double(), SAMPLES.tensors[1])
    loaders = DataLoader(doubles, 4), DataLoader(doubles, 3)

    def work(comm: Communicator) -> Tensor:
        job_of_each_rank[greenlet.getcurrent()] = OwnLoop(comm, SampleCounts(1, comm.size))
        return epoch(*make(Alone()), zip(*map(distribute.shard, loaders), strict=False))

    for rank, found in enumerate(VirtualWorld(2).run(work)):
        pairs = list(zip(*(list(one)[rank::2] for one in loaders), strict=False))
        torch.testing.assert_close(found, epoch(*make(), pairs), rtol=0, atol=1e-12)


def test_a_shuffled_loader_deals_each_sample_once_in_the_order_of_rank_0(job_of_each_rank) -> None:
    def work(comm: Communicator) -> list[Tensor]:
        job_of_each_rank[greenlet.getcurrent()] = OwnLoop(comm, SampleCounts(1, comm.size))
        model, optimizer = make(Free())
        return train(model, optimizer, distribute.shard(loader(shuffle=True)))

    seen = torch.cat(list(chain(*VirtualWorld(3).run(work))))
    order = [tuple(row) for row in seen.tolist()]
    assert sorted(order) == sorted(tuple(row) for row in SAMPLES.tensors[0].tolist())


def test_an_accumulated_batch_that_some_rank_lacks_is_the_mean_of_what_it_had(job_of_each_rank) -> None:
    def work(comm: Communicator) -> tuple[list[str], Tensor]:
        job_of_each_rank[greenlet.getcurrent()] = OwnLoop(comm, SampleCounts(1, comm.size))
        model, optimizer = make(Alone(every=2))
        train(model, optimizer, distribute.shard(loader()))
        return distribute._current().steppers[0].worker.calls, vector(model)

    found = VirtualWorld(4).run(work)
    assert [calls for calls, _ in found] == [["step"]] * 4
    model, optimizer = make()
    batch = list(loader())[3]
    train(model, optimizer, [batch])
    torch.testing.assert_close(found[3][1], vector(model))


def test_settled_weights_are_the_same_everywhere_and_training_goes_on_from_the_own(job_of_each_rank) -> None:
    def work(comm: Communicator) -> tuple[Tensor, Tensor, Tensor]:
        job_of_each_rank[greenlet.getcurrent()] = OwnLoop(comm, SampleCounts(1, comm.size))
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
        job_of_each_rank[greenlet.getcurrent()] = OwnLoop(comm, SampleCounts(1, comm.size))
        make(Alone())
        with torch.no_grad():
            samples = sum(len(inputs) for inputs, _ in distribute.shard(loader()))
        return samples, distribute._current().steppers[0].worker.calls

    assert VirtualWorld(4).run(work) == [(8, []), (7, []), (4, []), (4, [])]


def test_two_models_at_two_paces_are_refused(job_of_each_rank) -> None:
    def work(comm: Communicator) -> None:
        job_of_each_rank[greenlet.getcurrent()] = OwnLoop(comm, SampleCounts(1, comm.size))
        make(Alone())
        second = nn.Linear(5, 3)
        distribute.distribute(second, torch.optim.SGD(second.parameters()), Sync())

    with pytest.raises(BadOption, match=r"strategy 'sync' .* cannot train beside that of the first model"):
        VirtualWorld(1).run(work)


def test_a_model_that_is_not_trained_here_is_refused(job_of_each_rank) -> None:
    def work(comm: Communicator) -> None:
        job_of_each_rank[greenlet.getcurrent()] = OwnLoop(comm, SampleCounts(1, comm.size))
        distribute.finish(nn.Linear(5, 3))

    with pytest.raises(BadOption, match=r"give it to distribute\(\) first"):
        VirtualWorld(1).run(work)


def test_an_optimizer_without_a_step_in_an_epoch_skips_no_round_of_it(job_of_each_rank) -> None:
    def work(comm: Communicator) -> list[list[str]]:
        job_of_each_rank[greenlet.getcurrent()] = OwnLoop(comm, SampleCounts(1, comm.size))
        model, optimizer = make(Alone())
        make(Alone())
        train(model, optimizer, distribute.shard(loader()))
        return [stepper.worker.calls for stepper in distribute._current().steppers]

    assert VirtualWorld(4).run(work) == [[["step", "step"], []]] * 2 + [[["step", "skip"], []]] * 2


def test_workers_that_wait_for_nobody_may_step_as_often_as_they_like(job_of_each_rank) -> None:
    def work(comm: Communicator) -> list[str]:
        job_of_each_rank[greenlet.getcurrent()] = OwnLoop(comm, SampleCounts(1, comm.size))
        model, optimizer = make(Free())
        for batch in distribute.shard(loader()):
            train(model, optimizer, [batch, batch])
        return distribute._current().steppers[0].worker.calls

    assert VirtualWorld(4).run(work) == [["step"] * 4] * 2 + [["step"] * 2] * 2


def test_the_rounds_of_a_rank_without_a_batch_are_completed_in_the_end(job_of_each_rank) -> None:
    """Of two passes behind a step the first two ranks have one, and the others none."""

    def work(comm: Communicator) -> list[str]:
        job_of_each_rank[greenlet.getcurrent()] = OwnLoop(comm, SampleCounts(1, comm.size))
        model, optimizer = make(Alone(every=2))
        train(model, optimizer, distribute.shard(list(loader())[:2]))
        distribute.finish(model)
        return distribute._current().steppers[0].worker.calls

    assert VirtualWorld(4).run(work) == [["step"]] * 2 + [["skip"]] * 2


def test_passes_are_gathered_without_gradients_being_zeroed(job_of_each_rank) -> None:
    def work(comm: Communicator) -> Tensor:
        job_of_each_rank[greenlet.getcurrent()] = OwnLoop(comm, SampleCounts(1, comm.size))
        model, optimizer = make(Alone(every=2))
        for inputs, targets in distribute.shard(list(loader())[:4]):
            nn.functional.cross_entropy(model(inputs.double()), targets).backward()
            optimizer.step()
        return vector(model)

    model, optimizer = make()
    batches = list(loader())
    for pair in (batches[:2], batches[2:4]):
        train(model, optimizer, [[torch.cat(parts) for parts in zip(*pair, strict=True)]])
    (found,) = VirtualWorld(1).run(work)
    torch.testing.assert_close(found, vector(model), rtol=0, atol=1e-12)


def test_one_rank_alone_may_give_its_optimizer_new_parameters(job_of_each_rank) -> None:
    def work(comm: Communicator) -> bool:
        job_of_each_rank[greenlet.getcurrent()] = OwnLoop(comm, SampleCounts(1, comm.size))
        _, optimizer = make(Alone())
        new = nn.Parameter(torch.ones(2))
        optimizer.add_param_group({"params": [new]})
        new.sum().backward()
        optimizer.step()
        return bool((new < 1).all())

    assert VirtualWorld(1).run(work) == [True]


def test_batches_are_noted_for_the_innermost_closure_alone() -> None:
    def work(comm: Communicator) -> None:
        loop = OwnLoop(comm, SampleCounts(1, 1))
        counts = [SampleCounts(number, number) for number in range(4)]
        with loop.noting() as outer:
            loop.begin_batch(counts[0])
            with loop.noting() as inner:
                loop.begin_batch(counts[1])
            loop.begin_batch(counts[2])
        loop.begin_batch(counts[3])
        assert inner == counts[1:2]
        assert outer == [counts[0], counts[2]]

    VirtualWorld(1).run(work)


def test_the_share_of_gathered_passes_is_that_of_their_samples(job_of_each_rank) -> None:
    """The last two batches have seven samples, of which the first rank has two of each."""

    def work(comm: Communicator) -> float:
        job_of_each_rank[greenlet.getcurrent()] = OwnLoop(comm, SampleCounts(1, comm.size))
        model, optimizer = make(Together(every=2))
        train(model, optimizer, distribute.shard(loader()))
        return distribute._current().steppers[0].worker.share

    assert VirtualWorld(2).run(work) == [4 / 7, 3 / 7]
