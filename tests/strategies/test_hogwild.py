"""Hogwild: workers move one vector of weights, each at its own pace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn, optim

import tutti
from tests.strategies.alone import LENGTH, SPEEDS, Setting, assert_close, finishes, gradient, run, sgd, start
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption
from tutti.strategies import Clip, Hogwild
from tutti.strategies.placement import place

LR = 0.1


def by_hand(setting: Setting, momentum: float = 0.0) -> tuple[Tensor, dict[int, list[int]]]:
    """Niu et al.'s loop on a clock: the weights are read when a batch begins, and moved when it ends.

    Returns the weights in the end, and how stale each worker's gradients were.
    """
    weights, ranks = start(), range(len(setting.speeds))
    seen, stale = dict.fromkeys(ranks, 0), {rank: [] for rank in ranks}
    read, velocity = {rank: start() for rank in ranks}, dict.fromkeys(ranks, torch.zeros(()))
    for before, (rank, step) in enumerate(finishes(setting.steps, setting.speeds)):
        velocity[rank] = momentum * velocity[rank] + gradient(read[rank], rank, step)
        weights = weights - LR * velocity[rank]
        stale[rank].append(before - seen[rank])
        seen[rank], read[rank] = before + 1, weights
    return weights, stale


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_the_trajectory_equals_updates_of_one_vector(momentum: float) -> None:
    """Each worker has a momentum of its own."""
    setting = Setting(Hogwild(), sgd(LR, momentum=momentum))
    assert_close(run(setting)[0].final, by_hand(setting, momentum)[0])


def test_staleness_age_and_exchanges_are_counted() -> None:
    setting = Setting(Hogwild())
    _, stale = by_hand(setting)
    for rank, outcome in enumerate(run(setting)):
        assert sorted(outcome.traffic.staleness.elements()) == sorted(stale[rank])
        assert outcome.traffic.exchanges == setting.steps
        assert outcome.traffic.bytes_sent >= setting.steps * 8 * LENGTH
        assert max(outcome.traffic.ages_s) == pytest.approx(SPEEDS[rank], abs=0.01)


class Tagger(nn.Module):
    """Scores from a table of words, and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 4, sparse=True)
        self.layer = nn.Linear(4, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.layer(self.table(words).mean(dim=0))


def train_words(comm: Communicator, clip: Clip) -> tuple[Tensor, Tensor, int]:
    """Rank r looks up words 10 r to 10 r + 2; returns the table before and after, and the bytes of a step."""
    module = Tagger()
    before = module.table.weight.detach().clone()
    replica = place(module, comm, Hogwild.home)
    worker = Hogwild().worker(replica, comm, optim.SGD(module.parameters(), lr=0.5), clip)
    for _ in range(4):
        module(10 * comm.rank + torch.arange(3)).square().sum().backward()
        assert module.table.weight.grad.is_sparse
        comm.compute(1 + 0.1 * comm.rank)
        worker.step()
        assert not replica.flats[0].grads.any()
    worker.finish()
    return before, module.table.weight.detach().clone(), worker.traffic.bytes_sent


@pytest.mark.parametrize("clip", [Clip(), Clip(norm=1e-3, value=0.1)], ids=["plain", "clipped"])
def test_an_embedding_has_only_the_rows_moved_that_were_looked_up(clip: Clip) -> None:
    for before, after, sent in VirtualWorld(2).run(train_words, clip):
        moved = (before != after).any(dim=1).nonzero().flatten().tolist()
        assert moved == [0, 1, 2, 10, 11, 12]
        assert sent < 4 * before.nbytes
        if clip.norm is not None:
            assert (before - after).norm() <= 8 * 0.5 * clip.norm


def test_one_worker_moves_rows_and_layers_as_plain_torch_does() -> None:
    module = Tagger()
    plain = optim.SGD(module.parameters(), lr=0.5)
    for _ in range(4):
        plain.zero_grad()
        module(torch.arange(3)).square().sum().backward()
        plain.step()
    _, found, _ = VirtualWorld(1).run(train_words, Clip())[0]
    torch.testing.assert_close(found, module.table.weight.detach())


@pytest.mark.parametrize(
    "options", [{"precision": "fp64", "class_weights": "9,2"}, {"precision": "fp16"}], ids=str
)
def test_rows_are_moved_like_a_dense_table_by_gradients_that_are_scaled(options: dict[str, str]) -> None:
    words, labels = torch.arange(48).reshape(16, 3) % 50, torch.arange(16) % 2
    whole = {"steps": 1, "batch_size": 16, "validation": 0, "optimizer": "sgd", "lr": 0.1, "quiet": True}
    moves = []
    for sparse in (False, True):
        torch.manual_seed(0)
        table = nn.Embedding(50, 4, sparse=sparse)
        model = nn.Sequential(table, nn.Flatten(), nn.Linear(12, 2))
        model.to(torch.float64 if options["precision"] == "fp64" else torch.float32)
        before = table.weight.detach().clone()
        tutti.train(model, (words, labels), strategy=Hogwild(), workers=1, **whole, **options)
        moves.append(table.weight.detach() - before)
    assert moves[0].any()
    # A weight of about 1 is rounded once.
    bound = 4 * torch.finfo(moves[0].dtype).eps
    torch.testing.assert_close(moves[1], moves[0], rtol=0, atol=bound)


def test_an_optimizer_that_may_use_all_parameters_together_is_refused_for_a_model_in_parts() -> None:
    class Own(optim.SGD):
        pass

    def work(comm: Communicator) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).double())
        replica = place(model, comm, Hogwild.home)
        Hogwild().worker(replica, comm, Own(model.parameters(), lr=0.1), Clip())

    with pytest.raises(BadOption, match=r"Own.* 2 parts"):
        VirtualWorld(1).run(work)
