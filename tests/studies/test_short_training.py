"""Short trainings in fp32 and bf16: models for which bf16 works, and models that it spoils."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import open_data
from tutti.run.build import Task, open_config_data, prepare_task, seeded
from tutti.run.config import TrainConfig
from tutti.run.jobs import Job
from tutti.run.pickled_arguments import by_name
from tutti.studies.autotune.candidates import Candidate
from tutti.studies.autotune.short_training import short_trainings, some_of
from tutti.studies.autotune.twins import Twins

FP32 = Candidate(1, 1, "fp32", "contiguous", 32)
PAIR = FP32, replace(FP32, precision="bf16")


class Offset(nn.Module):
    """A linear model with weights near 50, minus that offset: updates are smaller than a step of bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((10, 64), 50.0))

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        return nn.functional.linear(flat, self.weight) - 50 * flat.sum(1, keepdim=True)


class Deep(nn.Module):
    """30 layers that amplify their inputs: rounding grows from layer to layer."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Flatten()]
        for _ in range(30):
            layer = nn.Linear(64, 64)
            nn.init.normal_(layer.weight, std=3 / 8)
            layers += [layer, nn.Tanh()]
        self.layers = nn.Sequential(*layers, nn.Linear(64, 10))

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.layers(inputs)
        return found


class LostInEvaluation(nn.Module):
    """A model that trains, but whose outputs in evaluation are not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.outputs(inputs.flatten(1))
        return found if self.training else found * torch.inf


def tried(
    updates: int = 40,
    task: Task | None = None,
    is_late: Callable[[], bool] = lambda: False,
    pair: tuple[Candidate, Candidate] = PAIR,
    **given: object,
) -> Twins:
    """Return the result of short trainings of a model on data."""
    objects = {name: given.pop(name) for name in ("model", "data") if name in given}
    values, pickled = by_name(objects)
    config = TrainConfig(**{**values, **given})  # type: ignore[arg-type]
    job = Job(config, objects=pickled, quiet=True)

    def rank(comm: Communicator) -> Twins:
        with seeded(0):
            found = task or prepare_task(job, open_config_data(job, comm))
            before = [one.clone() for one in found.module.state_dict().values()]
            result = short_trainings(job, comm, found, pair, updates, is_late)
            after = found.module.state_dict().values()
            assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
        return result

    (found,) = VirtualWorld(ranks=1).run(rank)
    return found


def amounts(offset: float) -> tuple[np.ndarray, np.ndarray]:
    """A smooth function of 4 numbers, with values `offset` +- 1."""
    drawn = np.random.default_rng(0)
    inputs = drawn.standard_normal((600, 4)).astype(np.float32)
    targets = np.tanh(inputs.sum(axis=1, keepdims=True)) + drawn.normal(0, 0.1, (600, 1)) + offset
    return inputs, targets.astype(np.float32)


def test_an_ordinary_model_follows() -> None:
    found = tried(model="mlp", data="digits", model_options={"hidden": [32]})
    assert found.follows, found.why()
    assert len(found.reference) == len(found.twins) == 3
    assert found.before > max(found.reference)


def test_no_training_begins_after_the_deadline() -> None:
    looks = iter([False, False, True])
    found = tried(20, model="mlp", data="digits", model_options={"hidden": [8]}, is_late=lambda: next(looks))
    assert not found.follows
    assert found.why().startswith("no time was left for all short trainings: give 'tutti plan'")
    assert next(looks, None) is None


def test_twins_in_fp32_are_equal_and_trainings_can_be_repeated() -> None:
    options = {"hidden": [8], "dropout": 0.5}
    first, again = (
        tried(20, pair=(FP32, FP32), model="mlp", data="digits", model_options=options) for _ in range(2)
    )
    assert first.reference == first.twins == again.twins
    assert len(set(first.reference)) == 3


@pytest.mark.parametrize(("offset", "follows"), [(0.0, True), (1000.0, False)])
def test_targets_that_bf16_cannot_tell_apart_are_detected_before_they_are_learned(
    offset: float, follows: bool
) -> None:
    found = tried(model="mlp", data=amounts(offset), model_options={"hidden": [32]}, lr=0.003)
    assert found.follows is follows, found.why()


@pytest.mark.parametrize(("model", "lr"), [(Offset, 0.003), (Deep, None)])
def test_updates_below_the_steps_of_bf16_and_amplified_rounding_are_detected(
    model: type[nn.Module], lr: float | None
) -> None:
    found = tried(model=model, data="digits", lr=lr)
    assert not found.follows, found.why()


@pytest.mark.parametrize(
    "options", [{"model": "mlp", "optimizer": "sgd", "lr": 1e30}, {"model": LostInEvaluation}]
)
def test_a_loss_that_is_not_finite_is_the_problem(options: dict[str, object]) -> None:
    assert tried(data="digits", **options).problem == "its loss is not finite in fp32"  # type: ignore[arg-type]


def test_a_schedule_that_is_too_long_for_a_short_training_is_the_problem() -> None:
    found = tried(model="mlp", data="digits", schedule="warmup_cosine", schedule_options={"warmup": 500})
    assert not found.follows
    assert "a short training cannot be made: schedule 'warmup_cosine' cannot be made" in found.problem


def test_the_probe_samples_are_always_the_same_and_distinct() -> None:
    found: list[Tensor] = []

    def rank(comm: Communicator) -> None:
        job = Job(TrainConfig(data="digits"), quiet=True)
        part = open_config_data(job, comm).train
        some = some_of(some_of(part, 200), 100)
        assert len(some) == 100
        taken, again = some.rows, some_of(some_of(part, 200), 100).rows
        assert taken is not None
        assert again is not None
        found.extend((taken, again))

    VirtualWorld(ranks=1).run(rank)
    assert torch.equal(*found)
    assert len(found[0].unique()) == 100


def test_the_probe_samples_of_files_have_their_targets(tmp_path: Path) -> None:
    np.save(tmp_path / "x_train.npy", np.arange(1000, dtype=np.float32)[:, None])
    np.save(tmp_path / "y_train.npy", np.repeat(np.arange(4), 250))

    def rank(comm: Communicator) -> None:
        some = some_of(open_data(str(tmp_path), comm, 0.0, options={"stream": True}).train, 100)
        inputs, targets = some.take(torch.arange(100))
        assert isinstance(inputs, Tensor)
        assert torch.equal(targets, some.targets)
        assert torch.equal(inputs[:, 0].long() // 250, targets)

    VirtualWorld(ranks=1).run(rank)
