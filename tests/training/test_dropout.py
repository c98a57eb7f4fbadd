"""Dropout by sample: the masks of torch's layers, whoever computes the samples, and as random as torch's."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from math import sqrt

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Adam
from torch.utils.checkpoint import checkpoint

from tests.trainers import trainer_by
from tests.training.blobs import blobs
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.strategies import Sync
from tutti.training.dropout import drawn_by_sample
from tutti.training.evaluation import evaluating

SHAPES = {
    nn.Dropout: (5, 7),
    nn.Dropout1d: (5, 7, 3),
    nn.Dropout2d: (5, 7, 3, 3),
    nn.Dropout3d: (5, 7, 2, 3, 2),
}
"""Inputs of each kind of layer, of five samples."""

DEVIATIONS = 5
"""How far from its expectation a count may be, in standard deviations. Each run has the same numbers."""


def outputs(
    module: nn.Module, inputs: Tensor, samples: list[int] | None = None, epoch: int = 0, seed: int = 0
) -> Tensor:
    with drawn_by_sample(module, seed) as masks:
        masks.begin(epoch, torch.arange(len(inputs)) if samples is None else torch.tensor(samples))
        return module(inputs)


def kept(p: float = 0.5, layer: int = 0, samples: int = 400, size: int = 500, **given: int) -> Tensor:
    """Which numbers are kept, as 0.0 and 1.0."""
    module = nn.Sequential(*(nn.Dropout(p if number == layer else 0.0) for number in range(layer + 1)))
    return (outputs(module, torch.ones(samples, size), **given) != 0).double()


@pytest.mark.parametrize("kind", SHAPES)
def test_who_computes_a_sample_and_when_is_no_matter(kind: type[nn.Module]) -> None:
    layer, inputs = nn.Sequential(kind(0.4)), torch.randn(SHAPES[kind]).double()
    whole = outputs(layer, inputs, [11, 12, 13, 14, 15])
    torch.manual_seed(7)
    some = outputs(layer, inputs[[3, 0]], [14, 11])
    assert torch.equal(some, whole[[3, 0]])
    assert not torch.equal(whole, inputs)


@pytest.mark.parametrize("kind", SHAPES)
def test_the_values_are_those_that_torch_gives(kind: type[nn.Module]) -> None:
    inputs = torch.full(SHAPES[kind], 3.0, dtype=torch.float64)
    layer = kind(0.4)
    found, expected = outputs(layer, inputs).unique(), layer(inputs).unique()
    assert len(found) == 2
    assert torch.allclose(found, expected, rtol=1e-12)


@pytest.mark.parametrize("p", [0.001, 0.1, 0.5, 0.93])
def test_as_many_are_kept_as_should_be(p: float) -> None:
    found = kept(p)
    assert abs(found.mean() - (1 - p)) < DEVIATIONS * sqrt(p * (1 - p) / found.numel())
    for dim, counted in ((0, found.shape[0]), (1, found.shape[1])):
        rates = found.mean(dim)
        # The rates of columns and rows are spread as those of independent draws.
        expected = p * (1 - p) / counted
        assert abs(rates.var() / expected - 1) < DEVIATIONS * sqrt(2 / len(rates))


def correlation(one: Tensor, other: Tensor) -> float:
    """In standard deviations of independent draws at p = 0.5."""
    return float(((2 * one - 1) * (2 * other - 1)).mean().abs() * sqrt(one.numel()))


@pytest.mark.parametrize(
    "other",
    [
        lambda: kept(epoch=1),
        lambda: kept(seed=1),
        lambda: kept(layer=1),
        lambda: kept().roll(1, 0),
        lambda: kept().roll(1, 1),
        lambda: kept().roll((1, 1), (0, 1)),
    ],
    ids=["epoch", "seed", "layer", "sample", "element", "diagonal"],
)
def test_masks_have_nothing_to_do_with_each_other(other: Callable[[], Tensor]) -> None:
    assert correlation(kept(), other()) < DEVIATIONS


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_computed_again_for_the_backward_pass_draws_the_same(reentrant: bool) -> None:
    layer = nn.Dropout(0.5)
    inputs = torch.ones(20, 30, requires_grad=True)
    with drawn_by_sample(layer, 0) as masks:
        masks.begin(0, torch.arange(20))
        twice = checkpoint(layer, checkpoint(layer, inputs, use_reentrant=reentrant), use_reentrant=reentrant)
        twice.sum().backward()
    assert torch.equal(inputs.grad, twice.detach())


def test_a_layer_can_be_copied_and_sent_and_is_torchs_own_again_afterwards() -> None:
    module = nn.Sequential(nn.Linear(6, 6), nn.Dropout(inplace=True))
    inputs = torch.ones(9, 6)
    with drawn_by_sample(module, 0) as masks:
        masks.begin(0, torch.arange(9))
        copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module))]
        found = module(inputs)
        for one in copies:
            assert torch.equal(one(inputs), found)
            with evaluating(one):
                assert torch.equal(one(inputs), one[0](inputs))
    assert vars(module[1]).keys() == vars(nn.Dropout()).keys()


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Dropout(0.3), nn.Linear(16, 4), nn.Dropout(0.1))
    return layers.double()


def trained(ranks: int, passes: int = 1) -> tuple[Tensor, list[float]]:
    data = blobs(205)
    part = type(data)(data.inputs.double(), data.targets)

    def program(comm: Communicator) -> tuple[Tensor, list[float]]:
        torch.manual_seed(comm.rank)
        module = perceptron()
        optimizer = Adam(module.parameters(), lr=0.01)
        trainer = trainer_by(Sync(every=passes), comm, module, optimizer, part, 30, steps=17)
        losses = [record.train.loss for record in trainer.fit()]
        return torch.cat([flat.weights for flat in trainer.replica.flats]).clone(), losses

    found: tuple[Tensor, list[float]] = VirtualWorld(ranks).run(program)[0]
    return found


@pytest.mark.parametrize(("ranks", "passes"), [(2, 1), (3, 1), (1, 2), (2, 3)])
def test_any_number_of_ranks_and_passes_trains_as_one(ranks: int, passes: int) -> None:
    (weights, losses), (found, those) = trained(1), trained(ranks, passes)
    assert (found - weights).norm() < 1e-12 * weights.norm()
    assert those == pytest.approx(losses, rel=1e-12)
