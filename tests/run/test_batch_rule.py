"""Fewer workers go on with the batch of all before, or with a smaller one and a smaller learning rate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

import tutti
from tests.run.test_survival import INPUTS, TARGETS, Killed
from tutti.checkpoint.reading import open_checkpoint
from tutti.comm.shm.communicator import HostCommunicator
from tutti.data.batches import Batches
from tutti.data.parts import Part
from tutti.errors import BadOption, PeerLost
from tutti.records.run_folder import RunFolder
from tutti.run.assembled import RunContext
from tutti.run.batch_rule import resized, resized_text
from tutti.run.config import TrainConfig
from tutti.run.pickled_arguments import by_name
from tutti.run.resume import Resume
from tutti.run.train import train
from tutti.run.train_job import TrainJob
from tutti.strategies import STRATEGIES
from tutti.strategies.base import Pace

BATCH, RATE, EPOCHS, STEP_SIZE = 6, 0.3, 3, 20
SEEN = INPUTS.float().double()
"""The inputs as they are trained on: floats are kept in torch's default type."""

OPTIONS: dict[str, Any] = {
    "data": (INPUTS, TARGETS),
    "batch_size": BATCH,
    "epochs": EPOCHS,
    "validation": 0.0,
    "precision": "fp64",
    "optimizer": "sgd",
    "optimizer_options": {"momentum": 0.9},
    "lr": RATE,
    "quiet": True,
}


def job_of(**options: Any) -> TrainJob:
    return TrainJob(TrainConfig(model="mlp", on_failure="shrink", **options))


def test_ranks_that_hold_one_model_together_stay_as_many() -> None:
    job = TrainJob(TrainConfig(model="mlp", parallel="tensor"))
    assert resized(job, job.config, 2, 2).config.workers == "2"
    with pytest.raises(BadOption, match="--parallel tensor goes on with 2 ranks only"):
        resized(job, job.config, 2, 3)


def test_the_batch_shrinks_with_the_workers_and_the_rate_with_the_batch() -> None:
    job = job_of(on_shrink="scale", batch_size=64, steps=300)
    first, found = job.config, []
    for workers in (3, 2, 1):
        job = resized(job, first, 4, workers)
        found.append((job.config.workers, job.config.batch_size, job.lr_scale, job.config.steps))
    assert found == [("3", 48, 0.75, 400), ("2", 32, 0.5, 600), ("1", 16, 0.25, 1200)]
    assert resized_text(job, first) == (
        ", batches of 16 samples, which were 64 at first, and 0.25 times the learning rate "
        "(--on-shrink scale)"
    )


def test_the_rate_follows_the_batch_as_it_is_rounded() -> None:
    job = job_of(on_shrink="scale", batch_size=7)
    job = resized(job, job.config, 3, 2)
    assert (job.config.batch_size, job.lr_scale) == (5, 5 / 7)


def test_the_batch_stays_unless_it_is_to_shrink() -> None:
    job = job_of(batch_size=64)
    fewer = resized(job, job.config, 4, 3)
    assert fewer == replace(job, config=job.config.changed({"workers": "3"}))
    assert resized_text(fewer, job.config) == ", and batches of 64 samples as before (--on-shrink keep-batch)"


@pytest.mark.parametrize("name", STRATEGIES)
def test_of_the_batch_nothing_is_said_where_each_worker_has_its_own(name: str) -> None:
    job = job_of(strategy=name)
    shares = STRATEGIES[name].pace is Pace.TOGETHER
    assert bool(resized_text(job, job.config)) == shares


def net() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def by_hand(checkpoint: Path, batch: int, stepwise: bool) -> torch.Tensor:
    """Go on from a checkpoint with a smaller batch, in a loop of plain torch; returns the weights."""
    saved, module = open_checkpoint(checkpoint).saved(0, 1), net()
    optimizer = SGD(module.parameters(), lr=RATE * batch / BATCH, momentum=0.9)
    schedule = StepLR(optimizer, STEP_SIZE, 0.5 if stepwise else 1.0)
    for name, parameter in module.named_parameters():
        parameter.data.copy_(saved.joint.tensors[f"weights/{name}"])
        optimizer.state[parameter]["momentum_buffer"] = saved.joint.tensors[
            f"optimizer/{name}/momentum_buffer"
        ].clone()
    epoch, made = saved.shared["training"]["epoch"], saved.shared["batches"]["rounds"][0]
    orders = Batches(Part(INPUTS, TARGETS), BATCH)
    left = torch.cat([orders.order(number) for number in range(EPOCHS)])[epoch * len(INPUTS) + made * BATCH :]
    for _ in range((EPOCHS * len(INPUTS) - len(left)) // batch):
        optimizer.step()  # Without gradients: for the schedule, which wants it.
        schedule.step()
    for samples in left.split(batch):
        optimizer.zero_grad()
        functional.cross_entropy(module(SEEN[samples]), TARGETS[samples]).backward()
        optimizer.step()
        schedule.step()
    return torch.cat([one.detach().flatten() for one in module.parameters()])


@pytest.mark.parametrize("stepwise", [False, True], ids=["rate", "schedule"])
def test_a_run_goes_on_as_one_that_is_begun_by_hand_with_that_batch_and_rate(
    tmp_path: Path, stepwise: bool
) -> None:
    given: dict[str, Any] = {"schedule": "StepLR", "schedule_options": {"step_size": STEP_SIZE, "gamma": 0.5}}
    values, objects = by_name({"model": net(), "data": OPTIONS["data"]})
    plain = {name: value for name, value in OPTIONS.items() if name not in ("data", "quiet")}
    plain |= {"checkpoint": "13 steps", "on_shrink": "scale", "out": str(tmp_path / "run")}
    config = TrainConfig.from_json({**values, **plain, **(given if stepwise else {})})
    job = TrainJob(config, objects=objects, quiet=True, bring_weights=True)
    comm = HostCommunicator.alone()
    train(comm, job, RunContext())
    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000013"
    wanted = by_hand(checkpoint, 2, stepwise)

    fewer = resized(job, config, 3, 1)
    found = train(comm, replace(fewer, resume=Resume(tmp_path / "run", checkpoint)), RunContext())
    assert found.weights is not None
    weights = torch.cat([found.weights[name].flatten() for name, _ in net().named_parameters()])
    torch.testing.assert_close(weights, wanted, rtol=0, atol=1e-12)
    assert [(one.epoch, one.step) for one in found.history] == [(1, 10), (2, 34), (3, 64)]
    start = RunFolder(tmp_path / "run").starts().records[-1]
    assert (start.step, start.batch_size, start.lr) == (13, 2, RATE / 3)
    # The next one that goes on finds batch and rate in the configuration.
    kept = TrainConfig.read(tmp_path / "run", trust=True)
    assert (kept.batch_size, kept.lr) == (2, RATE / 3)


def test_a_rate_that_follows_the_losses_keeps_what_these_have_made_of_it(tmp_path: Path) -> None:
    rule = {"factor": 0.1, "patience": 0, "threshold": 0.99, "min_lr": 6e-6}  # It falls with each epoch.
    values, objects = by_name({"model": net(), "data": OPTIONS["data"]})
    plain = {name: value for name, value in OPTIONS.items() if name not in ("data", "quiet")}
    plain |= {"epochs": 7, "on_shrink": "scale", "out": str(tmp_path / "run")}
    config = TrainConfig.from_json({**values, **plain, "schedule": "plateau", "schedule_options": rule})

    def rates(job: TrainJob, keep: int) -> list[float]:
        """Keep the state after so many more steps; go on from what was kept so before."""
        there = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
        resume = Resume(tmp_path / "run", there[-2]) if there else None  # The last is of the end.
        job = replace(job, config=replace(job.config, checkpoint=f"{keep} steps"), resume=resume)
        return [record.lr for record in train(HostCommunicator.alone(), job, RunContext()).history]

    three = TrainJob(config, objects=objects, quiet=True)
    assert rates(three, 36) == pytest.approx([0.3, 0.3, 0.03, 3e-3, 3e-4, 3e-5, 6e-6])
    two = resized(three, config, 3, 2)
    assert rates(two, 30) == pytest.approx([0.3, 0.3, 0.03, 2e-3, 2e-4, 2e-5, 4e-6])
    fewest = pytest.approx([0.3, 0.3, 0.03, 2e-3, 2e-4, 1e-5, 2e-6])
    assert rates(resized(two, config, 3, 1), 40) == fewest
    resumed = replace(three, config=TrainConfig.read(tmp_path / "run", trust=True))
    assert rates(resumed, 500) == fewest


def test_a_run_that_loses_a_rank_says_and_keeps_what_batch_and_rate_it_goes_on_with(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    survived = tutti.train(
        net(),
        workers=3,
        callbacks=Killed(tmp_path, [(1, 12)]),
        on_failure="shrink",
        on_shrink="scale",
        out=str(tmp_path / "run"),
        **OPTIONS,
    )
    assert len(survived.history[-1].ranks) == 2
    assert (survived.config.batch_size, survived.config.lr) == (4, RATE * (4 / 6))
    assert sum(one.train.samples for one in survived.history) == EPOCHS * len(INPUTS)
    said = capfd.readouterr().err
    assert "going on with 2 new ranks, batches of 4 samples, which were 6 at first, and 0.6667 times" in said
    last = RunFolder(tmp_path / "run").starts().records[-1]
    assert (last.world.ranks, last.batch_size) == (2, 4)


def test_a_batch_that_no_update_shares_is_not_shrunk() -> None:
    with pytest.raises(BadOption, match="shrinks the batch of an update that all workers make"):
        tutti.train(net(), workers=1, strategy="local", on_failure="shrink", on_shrink="scale", **OPTIONS)


def test_another_batch_for_other_ranks_is_refused_where_there_will_be_none() -> None:
    with pytest.raises(BadOption, match="on_failure='stop' it does not; give shrink or respawn"):
        tutti.train(net(), workers=1, on_shrink="scale", **OPTIONS)


def test_a_rate_that_a_function_sets_is_not_scaled() -> None:
    options = {
        name: value for name, value in OPTIONS.items() if name not in ("optimizer", "optimizer_options", "lr")
    }
    options["on_failure"] = "shrink"
    with pytest.raises(BadOption, match="changes the learning rate"):
        tutti.train(net(), workers=1, optimizer=lambda p: SGD(p, lr=0.1), on_shrink="scale", **options)


@pytest.mark.parametrize(
    "given",
    [
        {"schedule": "CyclicLR", "schedule_options": {"base_lr": 0.01, "max_lr": 0.05}},
        {"schedule": "one_cycle", "schedule_options": {"max_lr": 0.1}},
        {"schedule": "cosine", "schedule_options": {"eta_min": 0.1}},
    ],
)
def test_rates_that_a_schedule_has_of_its_own_are_not_scaled(given: dict[str, Any]) -> None:
    with pytest.raises(BadOption, match=r"changes the learning rate, and schedule .* has rates of its own"):
        tutti.train(net(), workers=1, on_failure="shrink", on_shrink="scale", **given, **OPTIONS)


@pytest.mark.parametrize("schedule", ["one_cycle", "cosine", "StepLR", "CosineAnnealingWarmRestarts"])
def test_schedules_that_follow_the_rate_of_the_optimizer_are_scaled(schedule: str) -> None:
    options = {"StepLR": {"step_size": 3}, "CosineAnnealingWarmRestarts": {"T_0": 7}}.get(schedule, {})
    given = {**OPTIONS, "schedule": schedule, "schedule_options": options}
    plain = tutti.train(net(), workers=1, **given)
    scaled = tutti.train(net(), workers=1, on_failure="shrink", on_shrink="scale", **given)
    assert [one.lr for one in scaled.history] == [one.lr for one in plain.history]


def test_the_call_of_the_beginning_resumes_a_run_that_was_scaled(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    options = {**OPTIONS, "on_failure": "shrink", "on_shrink": "scale", "epochs": EPOCHS}
    with pytest.raises(PeerLost):
        tutti.train(
            net(),
            workers=3,
            callbacks=Killed(tmp_path, [(2, 12), (1, 20)]),
            max_failures=1,
            checkpoint="1 epoch",
            out=out,
            **options,
        )
    found = tutti.train(net(), workers=2, callbacks=tutti.Callback(), resume=out, **options)
    assert found.config.batch_size == 4
    assert [one.train.samples for one in found.history] == [len(INPUTS)] * EPOCHS
