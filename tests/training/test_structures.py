"""Models with several inputs, sequences, and more than one output: the same however a batch is cut."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Mapping
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim import SGD

from tests.trainers import trainer_by
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import Batches, DataSet, open_data
from tutti.errors import BadModel
from tutti.strategies import Sync
from tutti.training.evaluation import Objective, evaluate
from tutti.training.losses import LossBatch, named_loss
from tutti.training.metrics import METRICS
from tutti.training.precision import Arithmetic, the_output
from tutti.training.prediction import predict
from tutti.training.preflight import check_fit, told_of_sequences

FP64 = Arithmetic("fp64")
SAMPLES, BATCH = 45, 20
RANDOM = np.random.default_rng(4)
LABELS = RANDOM.integers(0, 3, SAMPLES)
POINTS, AGES = RANDOM.normal(size=(SAMPLES, 2, 3)), RANDOM.normal(size=SAMPLES)
TOKENS = [RANDOM.integers(0, 9, RANDOM.integers(1, 12)).tolist() for _ in range(SAMPLES)]
TOKENS[0] = list(range(9))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.points, self.age, self.last = nn.Linear(6, 5), nn.Linear(1, 5), nn.Linear(5, 3)

    def forward(self, points: Tensor, age: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.points(points.flatten(1)) + self.age(age))
        return self.last(hidden), hidden


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.cells, self.last = (
            nn.Embedding(9, 4),
            nn.GRU(4, 5, batch_first=True),
            nn.Linear(5, 3),
        )

    def forward(self, tokens: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        packed = pack_padded_sequence(self.tokens(tokens), lengths, batch_first=True, enforce_sorted=False)
        hidden = self.cells(packed)[1][0]
        return {"hidden": hidden, "logits": self.last(hidden)}


def aided(outputs: tuple[Tensor, Tensor], batch: LossBatch) -> tuple[Tensor, Tensor]:
    """A loss of all outputs and inputs, with a denominator of its own."""
    scores, hidden = outputs
    assert isinstance(batch.inputs, dict)
    weights = batch.inputs["age"][:, 0].exp()
    each = functional.cross_entropy(scores, batch.targets, reduction="none") + 0.1 * hidden.square().sum(1)
    return (each * weights).sum(), weights.sum()


def aided_mean(outputs: tuple[Tensor, Tensor], batch: LossBatch) -> Tensor:
    total, weight = aided(outputs, batch)
    return total / weight


def by_logits(outputs: Mapping[str, Tensor], batch: LossBatch) -> Tensor:
    return functional.cross_entropy(outputs["logits"], batch.targets)


CASES: dict[str, tuple[object, type[nn.Module], object, Callable[..., Tensor]]] = {
    "two inputs": (
        {"points": POINTS, "age": AGES},
        TwoInputs,
        "auto",
        lambda o, b: by_logits({"logits": o[0]}, b),
    ),
    "aided": ({"points": POINTS, "age": AGES}, TwoInputs, aided, aided_mean),
    "by position": ((POINTS, AGES), TwoInputs, "auto", lambda o, b: by_logits({"logits": o[0]}, b)),
    "sequences": (TOKENS, Recurrent, "auto", by_logits),
}
"""The inputs, the model, the loss as it is given, and the same as a mean over a whole batch."""


def opened(inputs: object, comm: Communicator) -> DataSet:
    return open_data((inputs, LABELS), comm, validation=0)


def made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return FP64.prepare(kind())


def trained(comm: Communicator, name: str, passes: int) -> tuple[Tensor, float, Tensor | None]:
    """The weights and the loss after a run, and the outputs."""
    inputs, kind, spec, _ = CASES[name]
    dataset, module, way = opened(inputs, comm), made(kind), Sync(every=passes)
    optimizer = SGD(module.parameters(), lr=0.3, momentum=0.9)
    loss, part = named_loss(spec, dataset), dataset.train
    objective = {"loss": loss, "metrics": [METRICS["accuracy"]], "arithmetic": FP64}
    trainer_by(way, comm, module, optimizer, part, BATCH, **objective, epochs=2).fit()
    comm.barrier()
    objective = check_fit(module, part, Objective(loss, [METRICS["accuracy"]], 3, FP64))
    found = evaluate(module, part, comm, objective, batch_size=7).total(comm)
    outputs = predict(module, part, comm, FP64)
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone(), found.loss, outputs


def by_torch(name: str) -> tuple[Tensor, float, Tensor]:
    inputs, kind, _, mean = CASES[name]
    module, part = made(kind), VirtualWorld(1).run(lambda comm: opened(inputs, comm))[0].train
    optimizer = SGD(module.parameters(), lr=0.3, momentum=0.9)

    def loss_of(chosen: Tensor) -> tuple[object, Tensor]:
        seen, targets = part.take(chosen)
        seen = FP64.inputs(seen)
        outputs = module(**seen) if isinstance(seen, dict) else module(*seen)
        given = seen if isinstance(seen, dict) else {"age": seen[1]}
        return outputs, mean(outputs, LossBatch(given, targets))

    for epoch in range(2):
        for chosen in Batches(part, BATCH, seed=5).order(epoch).split(BATCH):
            optimizer.zero_grad()
            loss_of(chosen)[1].backward()
            optimizer.step()
    with torch.no_grad():
        outputs, loss = loss_of(torch.arange(SAMPLES))
    return nn.utils.parameters_to_vector(module.parameters()).detach(), loss.item(), the_output(outputs)


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_torch_however_a_batch_is_cut(name: str) -> None:
    weights, loss, outputs = by_torch(name)
    assert (weights - nn.utils.parameters_to_vector(made(CASES[name][1]).parameters())).norm() > 0.1
    for ranks, passes in ((1, 1), (2, 1), (3, 2)):
        found = VirtualWorld(ranks).run(lambda comm, passes=passes: trained(comm, name, passes))
        for ours, value, _ in found:
            assert (ours - weights).norm() / weights.norm() < 1e-12
            assert value == pytest.approx(loss, rel=1e-12)
        assert found[0][2] is not None
        torch.testing.assert_close(found[0][2], outputs, rtol=1e-12, atol=1e-12)


def test_the_output_is_found_in_what_models_return() -> None:
    one, other = torch.ones(1), torch.zeros(1)
    for found in (
        one,
        (one, other),
        [one],
        {"hidden": other, "logits": one, "output": other},
        {"hidden": other, "output": one},
        SimpleNamespace(logits=one, loss=other),
        namedtuple("Outputs", "loss logits")(other, one),
    ):
        assert the_output(found) is one
    for unknown, said in (
        ({"hidden": other}, "a dict of hidden"),
        ((None, one), "a tuple"),
        (3, "a int"),
    ):
        with pytest.raises(BadModel, match=f"returns {said}; return a tensor"):
            the_output(unknown)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(1, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        assert attention_mask is not None
        mean = (input_ids * attention_mask).sum(1, keepdim=True) / attention_mask.sum(1, keepdim=True)
        return self.last(mean.to(self.last.weight.dtype))


def test_a_model_that_takes_a_mask_gets_that_in_place_of_lengths() -> None:
    masks = [[1] * len(one) for one in TOKENS]
    for inputs in (TOKENS, {"input_ids": TOKENS}, {"input_ids": TOKENS, "attention_mask": masks}):
        part = VirtualWorld(1).run(lambda comm, inputs=inputs: opened(inputs, comm))[0].train
        told = told_of_sequences(part, made(Masked))
        seen, _ = told.take(torch.tensor([2, 0]))
        mask = seen["attention_mask"] if isinstance(seen, dict) else seen[1]
        assert len(seen) == 2
        assert [int(row.sum()) for row in mask] == [len(TOKENS[2]), len(TOKENS[0])]
        assert (mask.diff(dim=1) <= 0).all()
        check_fit(made(Masked), told, Objective(named_loss("auto", DataSet("", part, None, None, 3, ()))))
    part = VirtualWorld(1).run(lambda comm: opened(TOKENS, comm))[0].train
    assert told_of_sequences(part, made(Recurrent)).stored_inputs == part.stored_inputs
