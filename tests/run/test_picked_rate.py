"""`--lr auto`: a range test picks the rate, the same for any number of ranks, and leaves no other trace."""

from __future__ import annotations

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption
from tutti.reports.runs import Run
from tutti.run import picked_rate
from tutti.run import train as training
from tutti.run.build import open_config_data, prepare_task, seeded
from tutti.run.checks import check_recipe
from tutti.run.config import TrainConfig
from tutti.run.picked_rate import pick_rate
from tutti.run.pickled_arguments import by_name
from tutti.run.train import work
from tutti.run.train_job import RunOutcome, TrainJob
from tutti.training.range_test import RangeTest

pytestmark = pytest.mark.usefixtures("nothing_beside")

INPUTS = torch.randn(240, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
DATA = (INPUTS, (INPUTS.sum(1) > 0).long())
STEPS = 500


class Quiet(nn.Sequential):
    """Layers with random numbers of the samples."""

    def __init__(self) -> None:
        hidden = [nn.Linear(6, 16), nn.Tanh(), nn.Dropout(0.1)]
        super().__init__(*hidden, nn.Linear(16, 2))


class Net(Quiet):
    """The same with statistics, and with random numbers of the rank's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.insert(1, nn.BatchNorm1d(16))

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + 0.01 * torch.randn(())


def job(**options: Any) -> TrainJob:
    """A run that prints and writes nothing."""
    named, objects = by_name(
        {"data": DATA, **{name: options.pop(name) for name in ("model",) if name in options}}
    )
    common = {
        "model": "mlp",
        "model_options": {"hidden": [16]},
        "steps": STEPS,
        "precision": "fp64",
        "validation": 0,
    }
    config = TrainConfig(**{**common, "lr": "auto", **named, **options})
    return TrainJob(config, objects=objects, quiet=True, write=False, bring_weights=True)


def trained(ranks: int, **options: Any) -> RunOutcome:
    outcome = VirtualWorld(ranks).run(work, pickle.dumps(job(**options)))[0]
    assert isinstance(outcome, RunOutcome)
    return outcome


def picked(comm: Communicator, payload: bytes) -> RangeTest:
    """Make the range test of a job alone."""
    recipe = pickle.loads(payload)
    with seeded(recipe.config.seed):
        return pick_rate(recipe, comm, prepare_task(recipe, open_config_data(recipe, comm)))


@pytest.mark.parametrize("optimizer", ["adam", "sgd", "muon"])
def test_any_number_of_ranks_picks_the_same_rate(optimizer: str) -> None:
    payload = pickle.dumps(job(optimizer=optimizer, model=Quiet, model_options={}, accumulate=2))
    alone, *others = [VirtualWorld(ranks).run(picked, payload)[-1] for ranks in (1, 2, 3)]
    assert alone.rate is not None
    assert len(alone.rates) == STEPS // 20
    for one in others:
        assert (one.rate, one.why) == (alone.rate, alone.why)
        assert one.losses == pytest.approx(alone.losses, rel=1e-9)


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {"model": Net, "model_options": {}}),
        (2, {"schedule": "one_cycle", "accumulate": 2, "monitor": "train_loss", "patience": 9}),
        (3, {"strategy": "downpour", "servers": 1}),
    ],
    ids=str,
)
def test_the_run_is_that_with_the_picked_rate_given(ranks: int, options: dict[str, Any]) -> None:
    found = trained(ranks, **options)
    given = trained(ranks, **{**options, "lr": found.config.lr})
    assert isinstance(found.config.lr, float)
    assert found.config == given.config
    assert found.weights is not None
    assert given.weights is not None
    assert all(one.equal(given.weights[name]) for name, one in found.weights.items())
    assert [one.train for one in found.history] == [one.train for one in given.history]


def test_another_rate_of_adamw_beside_muon_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    measured = picked_rate.losses_of

    def look(workers: Any, *others: Any) -> list[float]:
        losses = measured(workers, *others)
        seen.append([group["lr"] for group in workers.optimizer.param_groups])
        return losses

    monkeypatch.setattr(picked_rate, "losses_of", look)
    payload = pickle.dumps(job(optimizer="muon", optimizer_options={"adamw_lr": 0.004}))
    VirtualWorld(1).run(picked, payload)
    [(muon, adamw)] = seen
    assert muon > 0.01
    assert adamw == 0.004


def test_a_run_too_short_for_a_test_has_the_optimizers_own_rate(capsys: pytest.CaptureFixture[str]) -> None:
    result = tutti.train("mlp", DATA, lr="auto", steps=399, workers=1, precision="fp64")
    assert result.config.lr == 0.001
    assert "5 % of the run's 399 updates are 19, and a range test needs 20" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "Adadelta"}, "Adadelta, which finds the size of each update itself; leave --lr out"),
        ({"optimizer": "rprop"}, "Rprop, which finds"),
        ({"optimizer": "adafactor"}, "Adafactor, which finds"),
        ({"parallel": "tensor"}, "--lr auto does not go with --parallel tensor"),
        ({"precision": "fp16"}, "use --precision bf16"),
        ({"lr": "automatic"}, "--lr is 'automatic'; give a number, or auto"),
    ],
)
def test_options_that_rule_out_a_range_test_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        check_recipe(job(**options), 2)


def test_an_optimizer_made_by_a_function_has_its_own_rate() -> None:
    adam = partial(torch.optim.Adam, lr=0.1)
    with pytest.raises(BadOption, match="set lr there"):
        tutti.train("mlp", DATA, lr="auto", optimizer=lambda parameters: adam(parameters), quiet=True)


def test_single_steps_are_compared_with_a_number() -> None:
    with pytest.raises(BadOption, match="give a number"):
        check_recipe(job(), 2, compared=True)


def test_a_resumed_run_has_the_rate_of_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = partial(tutti.train, "mlp", DATA, lr="auto", workers=1, quiet=True, out=str(tmp_path))
    begun = run(steps=STEPS, checkpoint=f"{STEPS // 2} steps")

    def fail(*_: object) -> None:
        raise AssertionError("a second range test")

    monkeypatch.setattr(training, "pick_rate", fail)
    for place in ("auto", tmp_path / "checkpoints" / f"step-{STEPS // 2:08}"):
        assert run(steps=STEPS, resume=place).config.lr == begun.config.lr


def test_the_run_folder_has_the_figure_and_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tutti.train("mlp", DATA, lr="auto", steps=STEPS, workers=1, out=str(tmp_path))
    [why] = Run.read(tmp_path).course
    assert why.startswith(f"learning rate {result.config.lr:g}: ")
    assert why in capsys.readouterr().out
    drawn = (tmp_path / "learning-rate.svg").read_text()
    assert why in drawn
    assert drawn.count("<circle") <= STEPS // 20
