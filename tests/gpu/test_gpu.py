"""What needs an NVIDIA GPU: `make test-gpu`."""

from __future__ import annotations

import pytest
import torch

import tutti
from ecosystem.jobs import torchrun
from ecosystem.outcomes import DEVICE, RANKS, assert_same_on_every_rank

GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

CHECKS = (
    "plain",
    "small_buckets_that_are_the_gradients",
    "unused_parameters",
    "gradients_accumulated_without_exchange",
    "uneven_inputs",
    "halves_on_the_wire",
    "sharded_optimizer",
    "objects",
)


def outcomes(backend: str, devices: str, ranks: int, folder) -> None:
    done = torchrun(
        "data_parallel.py", str(folder), backend, ",".join(CHECKS), ranks=ranks, settings={DEVICE: devices}
    )
    assert done.returncode == 0, done.stdout + done.stderr


def compare(backend: str, devices: str, ranks: int, folder) -> None:
    outcomes("gloo", "cpu", ranks, folder)
    outcomes(backend, devices, ranks, folder)
    for check in CHECKS:
        assert_same_on_every_rank(folder, check, backends=("gloo", backend), ranks=ranks, tolerance=1e-3)


def test_ranks_that_share_one_gpu_exchange_through_host_memory(tmp_path):
    compare("tutti", "cuda:0", RANKS, tmp_path)


def test_one_rank_for_each_gpu_exchanges_through_nccl(tmp_path):
    compare("cpu:tutti,cuda:nccl", "cuda", GPUS, tmp_path)


def test_training_on_the_gpu_follows_training_on_the_cpu():
    losses = [
        tutti.train("cnn", "digits", workers=1, steps=30, device=device, quiet=True).history[-1].train.loss
        for device in ("cpu", "cuda")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_all_that_makes_a_gpu_fast_still_learns():
    options = {"precision": "bf16", "layout": "channels_last", "device": "cuda", "epochs": 20}
    result = tutti.train("cnn", "digits", workers=1, quiet=True, **options)
    assert result.summary.test.metrics["accuracy"] > 0.95
