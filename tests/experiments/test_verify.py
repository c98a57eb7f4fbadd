"""The comparison says yes to a right run and no to a wrong one, and names what differs by design."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from tutti.cli import verify as verify_command
from tutti.cli.main import main
from tutti.comm.base import Communicator
from tutti.comm.virtual import VirtualWorld
from tutti.experiments import deviation, verify
from tutti.experiments.config import TrainConfig
from tutti.experiments.deviation import Verdict
from tutti.experiments.job import VerifyJob
from tutti.strategies import sync

CONFIG = TrainConfig(
    model="mlp", model_options={"hidden": [16]}, steps=10, batch_size=50, precision="fp64", clip_norm=0.5
)


def compared(config: TrainConfig, ranks: int, dtype: str = "float64") -> Verdict:
    payload = pickle.dumps(VerifyJob(config, dtype))

    def rank(comm: Communicator) -> Verdict:
        return verify.work(comm, payload)

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


def test_float32_is_judged_by_what_rounding_explains() -> None:
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
    assert "does NOT follow" in deviation.describe(verdict, "float64")


def test_batch_norm_and_dropout_are_named_as_the_reason() -> None:
    module = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Dropout(0.0))
    named = list(deviation.reasons(module, "microbatch"))
    assert [reason.partition(" ")[0] for reason in named] == ["BatchNorm", "Dropout"]
    assert "'1'" in named[0]
    assert "statistics of each microbatch" in named[0]


def test_the_command_prints_the_table_and_the_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["mlp", "-n", "1", "--steps", "3", "--dtype", "float64", "--model.dropout", "0.3"]
    assert main(["verify", *words]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()[-5:-2]] == ["loss", "gradient", "weights"]
    assert shown.endswith("verdict: parallel training follows sequential training\n")


def test_the_exit_code_is_1_when_they_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deviation, "AMPLE", -1.0)
    monkeypatch.setitem(deviation.TOLERANCES, "float64", dict.fromkeys(("loss", "gradient", "weights"), -1.0))
    assert main(["verify", "mlp", "-n", "1", "--steps", "1", "--dtype", "float64"]) == 1


def test_a_verdict_that_stayed_on_another_machine_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_command, "run_job", lambda *_: None)
    assert main(["verify", "mlp"]) == 1
    assert "Name this machine first in --hosts" in capsys.readouterr().err


def test_training_that_amplifies_rounding_is_not_called_wrong() -> None:
    # The first steps of RMSprop at its own rate are ten times too long: the loss jumps about.
    wild = replace(
        CONFIG,
        model_options={},
        clip_norm=None,
        precision="fp32",
        optimizer="rmsprop",
        batch_size=32,
        steps=20,
    )
    verdict = compared(wild, 2, "float32")
    weights = verdict.deviations["weights"]
    assert weights.rounding.largest > weights.tolerance
    assert verdict.follows or "nothing can be said" in deviation.describe(verdict, "float32")
