"""Losses with a denominator of their own: the same answer however a batch is cut."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD

from tests.trainers import Forgetful, trainer_by, trainer_of
from tests.training.blobs import blobs, model
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data.batches import Batch, Batches, Queue
from tutti.data.parts import DataSet, Part
from tutti.errors import BadOption
from tutti.records.run import EpochRecord
from tutti.replica import Replica
from tutti.strategies import Clip, ParamServer, Strategy, Sync
from tutti.training.evaluation import Objective, evaluate
from tutti.training.losses import Loss, LossFunction, named_loss
from tutti.training.metrics import METRICS
from tutti.training.precision import Arithmetic

BATCH, EPOCHS = 20, 2
WEIGHTS = torch.tensor([1.0, 5.0, 0.2, 0.0])
FP64 = Arithmetic("fp64")


def gaps(samples: int = 67, seed: int = 3) -> Part:
    """Of the samples, some have no label: the first 15, and then every fifth."""
    part = blobs(samples, seed)
    targets = part.targets.clone()
    targets[:15] = targets[::5] = -100
    return Part(part.inputs, targets)


def a_sum_with_its_weight(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    counts = (targets >= 0).double() * (1 + targets.clamp(min=0))
    each = functional.cross_entropy(outputs, targets.clamp(min=0), reduction="none")
    return (each * counts).sum(), counts.sum()


def its_mean(outputs: Tensor, targets: Tensor) -> Tensor:
    total, weight = a_sum_with_its_weight(outputs, targets)
    return total / weight


def half_a_batch() -> Part:
    """What rank 0 of 2 has of the first batch has no label."""
    part = blobs(40)
    targets = part.targets.clone()
    targets[Batches(part, BATCH, seed=5).order(0)[:10]] = -100
    return Part(part.inputs, targets)


def a_batch_without() -> Part:
    """What all ranks have of the second batch has no label."""
    part = blobs(67)
    targets = part.targets.clone()
    targets[Batches(part, BATCH, seed=5).order(0)[BATCH : 2 * BATCH]] = -100
    return Part(part.inputs, targets)


def nothing() -> Part:
    part = blobs(40)
    return Part(part.inputs, torch.full_like(part.targets, -100))


Given = str | LossFunction | tuple[str, dict[str, float], str | None]


def loss_of(given: Given, part: Part) -> Loss:
    """The loss that is given, as it is or by name, options and class weights."""
    return (
        named_loss(*given[:1], dataset(part), *given[1:])
        if isinstance(given, tuple)
        else named_loss(given, dataset(part))
    )


SKEWED = gaps()
COUNTS = torch.bincount(SKEWED.targets[SKEWED.targets >= 0], minlength=4).double()


def of_what_counts(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over the labels; where there is none, zero."""
    total = functional.cross_entropy(outputs, targets, reduction="sum")
    return total / max(1, int((targets >= 0).sum()))


def weighted(part: Part, *nothing: int) -> Part:
    """Give samples weights; those of some updates' samples are 0."""
    weights = torch.rand(len(part), generator=torch.Generator().manual_seed(4), dtype=torch.float64) * 3
    for update in nothing:
        weights[Batches(part, BATCH, seed=5).order(0)[update * BATCH : (update + 1) * BATCH]] = 0
    return replace(part, stored_weights=weights)


def by_weights(each: LossFunction) -> LossFunction:
    """Return the mean by the weights of samples."""

    def mean(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
        whole = weights.sum()
        return (each(outputs, targets) * weights).sum() / torch.where(whole > 0, whole, 1.0)

    return mean


def by_both(outputs: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """The mean by weights of classes times those of samples."""
    of_classes = WEIGHTS.double()[targets.clamp(min=0)].where(targets >= 0, 0.0)
    each = functional.cross_entropy(outputs, targets, weight=WEIGHTS.double(), reduction="none")
    return (each * weights).sum() / (of_classes * weights).sum()


def each_squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - functional.one_hot(targets, 4)).square()


each_cross_entropy = partial(functional.cross_entropy, reduction="none")

MEANS: dict[str, tuple[Part, Given, LossFunction]] = {
    "balanced": (
        SKEWED,
        ("cross_entropy", {"smoothing": 0.2}, "balanced"),
        partial(functional.cross_entropy, weight=COUNTS.sum() / (4 * COUNTS), label_smoothing=0.2),
    ),
    "plain": (blobs(67), "cross_entropy", functional.cross_entropy),
    "without labels": (gaps(), "cross_entropy", functional.cross_entropy),
    "a module": (gaps(), nn.CrossEntropyLoss(), functional.cross_entropy),
    "class weights": (
        blobs(67),
        nn.CrossEntropyLoss(weight=WEIGHTS),
        partial(functional.cross_entropy, weight=WEIGHTS.double()),
    ),
    "smoothed": (
        blobs(67),
        nn.CrossEntropyLoss(weight=WEIGHTS, ignore_index=2, label_smoothing=0.2),
        partial(functional.cross_entropy, weight=WEIGHTS.double(), ignore_index=2, label_smoothing=0.2),
    ),
    "nll": (
        blobs(67),
        nn.NLLLoss(weight=WEIGHTS, ignore_index=0),
        partial(functional.nll_loss, weight=WEIGHTS.double(), ignore_index=0),
    ),
    "sum and weight": (gaps(), a_sum_with_its_weight, its_mean),
    "a rank without": (half_a_batch(), "cross_entropy", functional.cross_entropy),
    "a batch without": (a_batch_without(), "cross_entropy", of_what_counts),
    "weights of samples": (weighted(blobs(67)), "cross_entropy", by_weights(each_cross_entropy)),
    "weights of both": (weighted(gaps()), nn.CrossEntropyLoss(weight=WEIGHTS), by_both),
    "weighted squares": (
        weighted(blobs(67)),
        "mse",
        by_weights(lambda outputs, targets: each_squared(outputs, targets).mean(1)),
    ),
    "a weighted module": (
        weighted(blobs(67)),
        nn.MultiMarginLoss(),
        by_weights(partial(functional.multi_margin_loss, reduction="none")),
    ),
    "a function of each": (weighted(blobs(67)), each_cross_entropy, by_weights(each_cross_entropy)),
    "a batch of weight 0": (weighted(blobs(67), 1), "cross_entropy", by_weights(each_cross_entropy)),
}
"""The samples, the loss as it is given to the loop, and the same by torch."""

NOTHING: tuple[Part, Given, LossFunction] = (
    nothing(),
    "cross_entropy",
    functional.cross_entropy,
)


def dataset(part: Part) -> DataSet:
    return DataSet("made up", part, None, None, 4, ())


def network(name: str) -> nn.Module:
    return nn.Sequential(model(), nn.LogSoftmax(1)) if name == "nll" else model()


def trained(
    ranks: int,
    name: str,
    passes: int = 1,
    strategy: Strategy | None = None,
    slow: int | None = None,
    **rest: int,
) -> list[tuple[list[EpochRecord], Tensor]]:
    """Each rank's history and final weights."""
    given = {"epochs": EPOCHS} if "steps" not in rest else rest

    def program(comm: Communicator) -> tuple[list[EpochRecord], Tensor]:
        seconds = {} if slow is None else {"seconds_per_sample": 20.0 if comm.rank == slow else 1.0}
        return rank_s_run(comm, name, strategy or Sync(every=passes), **seconds, **given)

    return VirtualWorld(ranks).run(program)


def rank_s_run(comm: Communicator, name: str, way: Strategy, **rest: int) -> tuple[list[EpochRecord], Tensor]:
    """A rank's history and final weights."""
    part, spec, _ = MEANS[name]
    module, weighted = FP64.prepare(network(name)), part.stored_weights is not None
    optimizer = SGD(module.parameters(), lr=0.3, momentum=0.9)
    objective = {"loss": loss_of(spec, part), "metrics": [METRICS["accuracy"]], "arithmetic": FP64}
    parts = way, comm, module, optimizer, part, BATCH, Clip(norm=0.5)
    history = trainer_by(*parts, **objective, weighted=weighted, **rest).fit()
    comm.barrier()
    return history, nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def by_torch(name: str) -> Tensor:
    """The weights after the same run in plain torch, by torch's own mean over each batch."""
    part, _, mean = MEANS[name]
    module = network(name).double()
    optimizer = SGD(module.parameters(), lr=0.3, momentum=0.9)
    order = Batches(part, BATCH, seed=5)
    for epoch in range(EPOCHS):
        for chosen in order.order(epoch).split(BATCH):
            (inputs, targets), weights = part.take(chosen), part.weights_of(chosen)
            optimizer.zero_grad()
            loss = mean(module(inputs.double()), targets, *([] if weights is None else [weights]))
            assert isinstance(loss, Tensor)
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
    return nn.utils.parameters_to_vector(module.parameters()).detach()


@pytest.mark.parametrize("name", MEANS)
@pytest.mark.parametrize(("ranks", "passes"), [(1, 1), (2, 1), (3, 1), (1, 3), (2, 3)])
def test_training_is_that_of_torch_however_a_batch_is_cut(name: str, ranks: int, passes: int) -> None:
    expected = by_torch(name)
    found = trained(ranks, name, passes)
    assert (expected - nn.utils.parameters_to_vector(network(name).parameters())).norm() > 0.1
    assert all((weights - expected).norm() / expected.norm() < 1e-12 for _, weights in found)
    alone = trained(1, name)[0][0]
    for mine, one in zip(found[0][0], alone, strict=True):
        assert mine.train.samples == one.train.samples == len(MEANS[name][0])
        assert mine.train.weighted is (MEANS[name][0].stored_weights is not None)
        assert mine.train.loss == pytest.approx(one.train.loss, rel=1e-12)
        assert mine.train.metrics == pytest.approx(one.train.metrics, rel=1e-12)


SERVED = ["without labels", "class weights", "sum and weight", "a batch without", "weights of both"]


@pytest.mark.parametrize("name", SERVED)
def test_a_parameter_server_divides_by_the_denominator_of_all(name: str) -> None:
    expected = by_torch(name)
    for _, weights in trained(3, name, strategy=ParamServer()):
        assert (weights - expected).norm() / expected.norm() < 1e-12


def test_a_denominator_of_all_workers_cannot_be_had_of_a_quorum() -> None:
    with pytest.raises(BadOption, match="quorum"):
        trained(3, "class weights", strategy=ParamServer(quorum=0.5))


class Noting(Forgetful):
    """Notes the gradient of each of its updates, and moves nothing."""

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        self.replica = replica
        self.gradients: list[Tensor] = []

    def step(self) -> None:
        grads = [p.grad for p in self.replica.module.parameters()]
        self.gradients.append(nn.utils.parameters_to_vector(grads).clone())
        self.replica.zero_grad()

    def finish(self) -> None:
        return


def by_autograd(mean: LossFunction, batch: Batch) -> Tensor:
    """The gradient of the mean over a batch; zero where that is one over nothing."""
    module = model().double()
    loss = mean(
        module(batch.inputs.double()), batch.targets, *([batch.weights] * (batch.weights is not None))
    )
    assert isinstance(loss, Tensor)
    return nn.utils.parameters_to_vector(torch.autograd.grad(loss, module.parameters())).nan_to_num()


@pytest.mark.parametrize(("ranks", "passes", "queue"), [(1, 3, False), (3, 1, False), (2, 3, True)])
@pytest.mark.parametrize("name", ["balanced", "sum and weight", "weights of samples"])
def test_a_worker_with_batches_of_its_own_has_the_gradient_of_each(
    name: str, ranks: int, passes: int, queue: bool
) -> None:
    part, spec, mean = MEANS[name]

    def program(comm: Communicator) -> list[Tensor]:
        module = FP64.prepare(model())
        replica = Replica(module)
        batches = Batches(part, 7, comm.rank, comm.size, passes, seed=5, own=True)
        worker = Noting(replica)
        trainer_of(
            comm=comm,
            replica=replica,
            worker=worker,
            optimizer=SGD(module.parameters(), lr=0.1),
            batches=Queue(batches, comm.counter().add) if queue else batches,
            loss=loss_of(spec, part),
            epochs=1,
            arithmetic=FP64,
            weighted=part.stored_weights is not None,
        ).fit()
        return worker.gradients

    found = [gradient for own in VirtualWorld(ranks).run(program) for gradient in own]
    size = 1 if queue else ranks  # a queue deals whole batches, and what is left of an epoch to one rank
    rounds = [
        update for rank in range(size) for update in Batches(part, 7, rank, size, seed=5, own=True).epoch(0)
    ]
    expected = [by_autograd(mean, batch) for _, passes in rounds for batch in passes if batch.share]
    assert len(found) == len(expected) >= 10
    if queue:  # whoever came first got it
        found, expected = (sorted(one, key=lambda gradient: float(gradient[0])) for one in (found, expected))
    for mine, wanted in zip(found, expected, strict=True):
        assert (mine - wanted).norm() <= 1e-12 * wanted.norm()


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_update_without_any_label_has_no_gradient(ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MEANS, "nothing", NOTHING)
    history, weights = trained(ranks, "nothing", steps=2)[0]
    assert torch.equal(weights, nn.utils.parameters_to_vector(model().double().parameters()).detach())
    assert history[0].train.samples == 40


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_evaluation_is_that_of_torch_over_what_has_a_label(ranks: int) -> None:
    part, module = gaps(67, seed=8), model().double()
    loss = named_loss("cross_entropy", dataset(part))

    def program(comm: Communicator) -> object:
        mine = copy.deepcopy(module)
        return evaluate(
            mine, part, comm, Objective(loss, [METRICS["accuracy"]], 4, FP64), batch_size=9
        ).total(comm)

    first, *others = VirtualWorld(ranks).run(program)
    assert all(other == first for other in others)
    outputs = module(part.inputs.double()).detach()
    assert first.samples == 67
    assert first.loss == pytest.approx(functional.cross_entropy(outputs, part.targets).item(), rel=1e-12)
    right = (outputs.argmax(1) == part.targets)[part.targets >= 0]
    assert first.metrics["accuracy"] == right.double().mean().item()
    assert sum(map(sum, first.confusion)) == len(right) < 67


@pytest.mark.parametrize("spec", [its_mean, a_sum_with_its_weight])
def test_a_loss_without_a_value_for_each_sample_takes_no_weights(spec: LossFunction) -> None:
    loss = named_loss(spec, dataset(weighted(blobs(10))))
    with pytest.raises(BadOption, match="no value for each sample"):
        loss.measure(torch.zeros(4, 4), torch.arange(4), torch.ones(4))


def test_a_loss_of_some_samples_alone_says_how_many_they_are() -> None:
    def masked(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs, targets, reduction="none")[targets > 0]

    loss = named_loss(masked, dataset(blobs(10)))
    with pytest.raises(BadOption, match="gives 2 values for 3 samples"):
        loss(torch.zeros(3, 4), torch.tensor([1, 0, 2]))
