"""Whole training runs on ranks that are started once for all of them, and the same runs in this process.

In float64: parallel and sequential training differ by the order of additions alone, and no further than that.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.comm.ranks import World
from tutti.comm.base import Communicator
from tutti.comm.shm.communicator import HostCommunicator
from tutti.errors import UserError
from tutti.records.run import EpochRecord, Summary
from tutti.run.config import TrainConfig
from tutti.run.train import work
from tutti.run.train_job import TrainJob

Run = dict[str, Any]
"""The fields of a `TrainConfig`."""

COMMON: Run = {
    "data": "tests.model_parallel.runs:images",
    "steps": 6,
    "batch_size": 16,
    "optimizer": "sgd",
    "optimizer_options": {"momentum": 0.9},
    "lr": 0.05,
    "precision": "fp64",
}

TOLERANCE = 1e-12
"""How far a weight or a loss may be from that of the same run on one rank."""

MLP: Run = COMMON | {"model": "mlp", "model_options": {"hidden": [24, 18]}}
LENET: Run = COMMON | {"model": "lenet"}
CNN: Run = COMMON | {"model": "cnn", "model_options": {"channels": [6, 8], "hidden": 16}}


WEIGHED: Run = {"loss": "tests.model_parallel.runs:by_class"}
by_class = torch.nn.CrossEntropyLoss(weight=torch.tensor([1.0, 4.0, 0.1, 2.0, 0.0]))
"""A loss whose denominator is not the number of samples."""


HEAVY: Run = WEIGHED | {"data": "tests.model_parallel.runs:weighted"}


def weighted() -> dict[str, Any]:
    """The same images; each sample has a weight, and some weigh nothing."""
    arrays = np.random.default_rng(1).integers(0, 5, 75) / 2
    (inputs, labels), (test_inputs, test_labels) = images()
    return {"x": inputs, "y": labels, "w": arrays, "x_test": test_inputs, "y_test": test_labels}


def images() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """Images of 14 x 14, each class with a pattern of its own: 75 to train and validate on, 23 to test."""
    random = np.random.default_rng(0)
    patterns = random.normal(size=(5, 1, 14, 14))
    labels = np.arange(98) % 5
    inputs = (patterns[labels] + random.normal(size=(98, 1, 14, 14))).astype(np.float32)
    return (inputs[:75], labels[:75]), (inputs[75:], labels[75:])


@dataclass(frozen=True)
class Found:
    """What a run found, or why it was refused."""

    history: list[EpochRecord]
    summary: Summary | None
    weights: dict[str, Tensor]
    refused: str = ""


def run(comm: Communicator, config: Run, **job: Any) -> Found:
    """Train; of `TrainJob` more than is usual may be given."""
    usual: dict[str, Any] = {"write": False}
    made = TrainJob(TrainConfig.from_json(config), quiet=True, bring_weights=True, **(usual | job))
    try:
        outcome = work(comm, pickle.dumps(made))
    except UserError as error:
        return Found([], None, {}, f"{type(error).__name__}: {error}")
    assert outcome.weights is not None
    return Found(outcome.history, outcome.summary, outcome.weights)


def run_all(comm: Communicator, runs: Mapping[str, Run]) -> dict[str, Found]:
    """Train one run after the other."""
    return {name: run(comm, config) for name, config in runs.items()}


def on_ranks(ranks: int, runs: Mapping[str, Run]) -> dict[str, Found]:
    """What rank 0 of so many found."""
    with World(ranks) as world:
        return world.run(run_all, dict(runs))[0]


def alone(config: Run) -> Found:
    """The same run on one rank, which has the whole model."""
    plain = {name: value for name, value in config.items() if not name.startswith("parallel")}
    return _alone(json.dumps(plain))


@cache
def _alone(config: str) -> Found:
    with closing(HostCommunicator.alone()) as comm:
        return run(comm, json.loads(config))


def deviation(found: Found, expected: Found) -> float:
    """The largest difference of a weight, or of a loss of training, validation and test."""
    assert not found.refused, found.refused
    assert found.weights.keys() == expected.weights.keys()
    weights = [
        (found.weights[name].double() - tensor.double()).abs().max().item()
        for name, tensor in expected.weights.items()
    ]
    losses = [abs(one - other) for one, other in zip(_losses(found), _losses(expected), strict=True)]
    return max([*weights, *losses])


def _losses(found: Found) -> list[float]:
    assert found.summary is not None
    every = [record.train for record in found.history] + [record.validation for record in found.history]
    return [one.loss for one in [*every, found.summary.test] if one is not None]
