"""Training on streamed samples: the same at any world size as in one process, and its waiting is seen."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from tests.trainers import trainer_by
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import open_data
from tutti.records.run import EpochRecord
from tutti.strategies import Sync
from tutti.training.metrics import METRICS
from tutti.training.precision import Arithmetic

OPTIONS = {"stream": True, "buffer": 0.002}


def train(
    folder: Path, ranks: int, seconds_per_sample: float | None = None
) -> tuple[list[EpochRecord], Tensor]:
    """Train for two epochs in double precision; returns rank 0's history, and the final weights."""

    def program(comm: Communicator) -> tuple[list[EpochRecord], Tensor]:
        data = open_data(str(folder), comm, 0.2, options=OPTIONS)
        torch.manual_seed(0)
        arithmetic = Arithmetic("fp64")
        module = arithmetic.prepare(nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 5)))
        optimizer = SGD(module.parameters(), lr=0.1, momentum=0.9)
        objective = {"metrics": [METRICS["accuracy"]], "classes": 5, "arithmetic": arithmetic}
        given = {"validation": data.validation, "epochs": 2, "seconds_per_sample": seconds_per_sample}
        trainer = trainer_by(Sync(), comm, module, optimizer, data.train, 12, **objective, **given)
        history = trainer.fit()
        return history, torch.cat([flat.weights.clone() for flat in trainer.replica.flats])

    return VirtualWorld(ranks=ranks).run(program)[0]


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_that_stream_train_as_one_process(shards: Path, ranks: int) -> None:
    alone, weights = train(shards, 1)
    together, others = train(shards, ranks)
    assert torch.allclose(weights, others, rtol=0, atol=1e-12)
    for one, other in zip(alone, together, strict=True):
        assert one.train.samples == other.train.samples
        assert one.validation.loss == pytest.approx(other.validation.loss, abs=1e-12)
        assert one.validation.metrics == other.validation.metrics


def test_waiting_for_files_is_a_stage(shards: Path) -> None:
    history, _ = train(shards, 1)
    assert all(record.ranks[0].stages["extract"] > 0 for record in history)
    assert all(record.ranks[0].stages["data"] > 0 for record in history)


def test_a_virtual_clock_does_not_count_real_waiting(shards: Path) -> None:
    history, _ = train(shards, 2, seconds_per_sample=0.001)
    assert all(rank.stages["extract"] == 0 for record in history for rank in record.ranks)
