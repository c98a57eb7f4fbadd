"""The comparison accepts a right run, rejects a wrong one, and names differences by design."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.comm.ranks import World
from tutti.cli import verify as verify_command
from tutti.cli.main import main
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.run.config import TrainConfig
from tutti.strategies import sync
from tutti.studies.verify import follow, tolerance
from tutti.studies.verify.tolerance import DTYPES, Deviation, Verdict, VerifyJob

CONFIG = TrainConfig(
    model="mlp", model_options={"hidden": [16]}, steps=10, batch_size=50, precision="fp64", clip_norm=0.5
)


def compared(config: TrainConfig, ranks: int, dtype: str = "float64") -> Verdict:
    payload = pickle.dumps(VerifyJob(config, dtype))

    def rank(comm: Communicator) -> Verdict:
        return follow.work(comm, payload)

    verdicts: list[Verdict] = VirtualWorld(ranks=ranks).run(rank)
    assert all(verdict.follows == verdicts[0].follows for verdict in verdicts)
    return verdicts[0]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
def test_sync_follows_sequential_training_in_float64(ranks: int, optimizer: str) -> None:
    momentum = {"momentum": 0.9} if optimizer == "sgd" else {}
    config = replace(CONFIG, optimizer=optimizer, optimizer_options=momentum, schedule="OneCycleLR", lr=0.01)
    verdict = compared(config, ranks)
    assert verdict.follows
    assert max(one.found.largest for one in verdict.deviations.values()) < 1e-12


def test_float32_may_differ_by_rounding() -> None:
    verdict = compared(replace(CONFIG, precision="fp32", clip_norm=None), 3, "float32")
    assert verdict.follows
    assert verdict.deviations["weights"].found.largest > 1e-12


def test_a_wrong_step_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = sync.Sync.worker

    def twice_the_rate(self: Any, replica: Any, comm: Any, optimizer: Any, clip: Any) -> Any:
        for group in optimizer.param_groups:
            group["lr"] *= 2
        return right(self, replica, comm, optimizer, clip)

    monkeypatch.setattr(sync.Sync, "worker", twice_the_rate)
    verdict = compared(CONFIG, 2)
    assert not verdict.follows
    assert "does NOT follow" in tolerance.describe(verdict, "float64")


def hidden_weights(outputs: Tensor, targets: Tensor) -> Tensor:
    """A mean with a hidden denominator."""
    weight = torch.tensor([9.0, *[0.1] * 9]).to(outputs)
    return nn.functional.cross_entropy(outputs, targets, weight=weight)


def told_weights(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same loss as a sum with its weight."""
    weight = torch.tensor([9.0, *[0.1] * 9]).to(outputs)
    total = nn.functional.cross_entropy(outputs, targets, weight=weight, reduction="sum")
    return total, weight[targets].sum()


def summed(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, reduction="sum")


class Noisy(nn.Linear):
    """A random model without a layer such as Dropout."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(1) + torch.randn(x[0].numel()))


class Centred(nn.Linear):
    """A model whose outputs depend on the other samples."""

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return super().forward(flat - flat.mean(0))


class TwoViews(nn.Linear):
    """A model that applies dropout to two views of each sample: the first views of all samples come first."""

    def forward(self, x: Tensor) -> Tensor:
        views = nn.functional.dropout(torch.cat([x.flatten(1), x.flatten(1)]), 0.5, self.training)
        return super().forward(sum(views.chunk(2)))


def two_views(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return TwoViews(64, outputs)


def noisy(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return Noisy(64, outputs)


def centred(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return Centred(64, outputs)


def normalised(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.Linear(16, outputs))


def dropping(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, outputs))


class KeptFixed(nn.Sequential):
    """A model that keeps its normalisation in evaluation mode."""

    def train(self, mode: bool = True) -> KeptFixed:
        super().train(mode)
        self[1].eval()
        return self


def fixed(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return KeptFixed(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, outputs))


def seven_ignored(outputs: Tensor, targets: Tensor) -> Tensor:
    """Parts of some batches have equally many labels that count, and others not."""
    return nn.functional.cross_entropy(outputs, targets, ignore_index=7)


def test_synchronised_batch_norm_follows_sequential_training() -> None:
    config = replace(CONFIG, model=f"{__name__}:normalised", model_options={})
    with World(3) as world:  # virtual ranks share a thread, and autograd
        verdict, *_ = world.run(follow.work, pickle.dumps(VerifyJob(config, "float64")))
    assert verdict.follows
    assert max(one.found.largest for one in verdict.deviations.values()) < 1e-10


def test_layers_that_a_model_keeps_in_evaluation_mode_do_not_differ() -> None:
    verdict = compared(replace(CONFIG, model=f"{__name__}:fixed", model_options={}), 2)
    assert verdict.follows
    assert not verdict.reasons


@pytest.mark.parametrize(
    "changed", [{"model": f"{__name__}:noisy", "model_options": {}}, {"loss": f"{__name__}:seven_ignored"}]
)
def test_other_differences_do_not_count_as_rounding(changed: dict[str, Any]) -> None:
    verdict = compared(replace(CONFIG, **changed), 2)
    assert not verdict.follows
    assert verdict.deviations["gradient"].found.largest > 1e-4
    assert all(one.rounding < 1e-12 for one in verdict.deviations.values())


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("ranks", "every"), [(2, 1), (1, 2)])
def test_a_loss_with_a_hidden_denominator_is_named_as_the_cause(dtype: str, ranks: int, every: int) -> None:
    options = {"strategy": "sync", "strategy_options": {"every": every}, "precision": DTYPES[dtype]}
    config = replace(CONFIG, loss=f"{__name__}:hidden_weights", **options)  # type: ignore[arg-type]
    verdict = compared(config, ranks, dtype)
    assert not verdict.follows
    assert verdict.at_once
    (cause,) = verdict.causes
    assert "hidden_weights" in cause
    assert "what to divide it by" in cause
    shown = tolerance.describe(verdict, dtype)
    assert "does NOT follow" in shown
    assert cause in shown


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_same_loss_follows_if_it_returns_its_weight(ranks: int) -> None:
    verdict = compared(replace(CONFIG, loss=f"{__name__}:told_weights"), ranks)
    assert verdict.follows
    assert not verdict.causes
    assert max(one.found.largest for one in verdict.deviations.values()) < 1e-12


def test_a_summed_loss_does_not_follow() -> None:
    assert not compared(replace(CONFIG, loss=f"{__name__}:summed"), 2).follows


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("normalised", "BatchNorm ('2') normalises with the statistics of each rank's own part"),
        ("noisy", "the model draws random numbers"),
        ("centred", "from all samples of its rank's own part"),
        ("two_views", "the model draws random numbers"),
    ],
)
def test_differences_by_design_are_named(model: str, words: str) -> None:
    verdict = compared(replace(CONFIG, model=f"{__name__}:{model}", model_options={}), 2)
    assert not verdict.follows
    assert not verdict.causes
    assert any(words in reason for reason in verdict.reasons), verdict.reasons
    assert "differs from sequential training by design" in tolerance.describe(verdict, "float64")


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("solo", 1), ("sync", 2), ("sync", 3)], ids=["alone", "two", "three, two passes"]
)
def test_dropout_draws_the_numbers_of_one_process(strategy: str, ranks: int) -> None:
    every = {"every": 2} if ranks == 3 else {}
    config = replace(CONFIG, strategy=strategy, strategy_options=every, steps=60)
    verdict = compared(replace(config, model=f"{__name__}:dropping", model_options={}), ranks)
    assert verdict.follows
    assert not verdict.reasons
    assert max(one.found.largest for one in verdict.deviations.values()) < 1e-12


def test_adding_up_parts_does_not_measure_rounding_if_the_whole_is_no_sum() -> None:
    one = Deviation(tolerance=1e-12, most=1e-6)
    one.added_up.note(1, 0.5, 1.0)
    one.reordered.note(1, 1e-16, 1.0)
    assert one.rounding == 1e-16
    assert not one.drowned
    one = Deviation(tolerance=1e-12, most=1e-6)
    one.added_up.note(1, 1e-16, 1.0)
    one.added_up.note(2, 0.5, 1.0)
    assert one.rounding == 0.5
    assert one.drowned


def test_the_command_prints_the_table_and_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["mlp", "-n", "1", "--steps", "3", "--dtype", "float64", "--model.dropout", "0.3"]
    assert main(["verify", *words]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[-5:-2]] == ["loss", "gradient", "weights"]
    assert shown.endswith("verdict: parallel training follows sequential training\n")


def test_the_exit_code_is_1_when_they_differ(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["mlp", "-n", "1", "--steps", "2", "--batch-size", "50", "--strategy.every", "2"]
    assert main(["verify", *words, "--strategy", "sync", "--loss", f"{__name__}:hidden_weights"]) == 1
    assert "does NOT follow" in capsys.readouterr().out


def test_a_verdict_on_another_machine_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_command, "run_job", lambda *_: None)
    assert main(["verify", "mlp"]) == 1
    assert "Name this machine first in --hosts" in capsys.readouterr().err


def test_a_training_that_amplifies_rounding_is_not_rejected() -> None:
    # The first steps of RMSprop at its default rate are ten times too long: the loss jumps.
    options = {"clip_norm": None, "precision": "fp32", "optimizer": "rmsprop", "batch_size": 32, "steps": 20}
    wild = replace(CONFIG, model_options={}, **options)  # type: ignore[arg-type]
    verdict = compared(wild, 2, "float32")
    weights = verdict.deviations["weights"]
    assert weights.rounding > weights.tolerance
    assert verdict.follows or "too much to say anything" in tolerance.describe(verdict, "float32")
