"""`tutti.train` from Python: objects instead of names."""

from __future__ import annotations

import json
import random
import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from torch import Tensor, nn

import tutti
from tests.preloaded import interpreter
from tutti.cli.main import main
from tutti.errors import BadModel

pytestmark = pytest.mark.usefixtures("nothing_beside")

INPUTS = torch.rand(120, 6, generator=torch.Generator().manual_seed(0))
TARGETS = (INPUTS.sum(1) * 2).long() % 5
DATA = ((INPUTS, TARGETS), (INPUTS[:40], TARGETS[:40]))
ONE = {"workers": 1, "threads": 1, "quiet": True, "epochs": 2}

SCRIPT = """
import sys
import torch
from torch import nn
from torch.utils.data import Dataset
import tutti

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, 5))
    def forward(self, x):
        return self.layers(x)

class Points(Dataset):
    def __len__(self):
        return 101
    def __getitem__(self, i):
        x = torch.rand(6, generator=torch.Generator().manual_seed(i))
        return x, int(2 * x.sum()) % 5

net = Net()
before = net.layers[0].weight.clone()
result = tutti.train(net, Points(), workers=2, strategy=tutti.Sync(), epochs=2, batch_size=16,
                     metrics=["accuracy", lambda out, y: (out.argmax(1) - y).abs()], out=sys.argv[1])
assert result.model is net and not torch.equal(before, net.layers[0].weight)
assert all(p.is_leaf and p.requires_grad for p in net.parameters())
result = tutti.train(Net, Points(), workers=2, epochs=1, model_options={"width": 4}, quiet=True)
assert result.model.layers[0].out_features == 4
print("samples", result.summary.samples, "ranks", result.summary.world.ranks)
"""


def net() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5))


def own_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=0.1)


def test_the_callers_module_is_trained() -> None:
    model = net()
    before = model[0].weight.clone()
    result = tutti.train(model, DATA, **ONE)
    assert result.model is model
    assert not torch.equal(before, model[0].weight)
    assert result.folder is None
    assert [record.epoch for record in result.history] == [1, 2]
    test = result.summary.test
    assert test is not None
    assert test.samples == 40
    with torch.no_grad():
        right = (model.eval()(INPUTS[:40]).argmax(1) == TARGETS[:40]).double().mean().item()
    assert test.metrics["accuracy"] == pytest.approx(right)


def test_functions_are_taken_for_loss_metric_optimizer_and_schedule() -> None:
    result = tutti.train(
        net(),
        lambda: DATA,
        loss=own_loss,
        metrics=[lambda outputs, targets: outputs.argmax(1) != targets, "top5"],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.5, momentum=0.9),
        schedule=lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5),
        **ONE,
    )
    assert result.history[0].train.metrics.keys() == {"<lambda>", "top5"}
    assert result.config.lr == 0.5
    assert result.history[-1].lr < 0.5
    assert result.config.loss.endswith(":own_loss")


def test_an_optimizer_class_takes_lr_and_options() -> None:
    result = tutti.train(
        net(), DATA, optimizer=torch.optim.SGD, lr=0.3, optimizer_options={"momentum": 0.5}, **ONE
    )
    assert result.config.optimizer == "torch.optim.sgd:SGD"
    assert result.history[-1].lr == 0.3
    rows = result.frame()
    rows = rows if isinstance(rows, list) else rows.to_dict("records")
    assert [row["train/loss"] for row in rows] == [record.train.loss for record in result.history]


def test_the_target_of_a_table_is_an_argument() -> None:
    table = pyarrow.table(
        {"a": [0.0, 1.0, 2.0, 4.0], "b": [1.0, 0.5, 2.0, 1.0], "kind": ["x", "y", "x", "y"]}
    )
    result = tutti.train("mlp", table, target="kind", validation=0, **ONE)
    assert result.config.data_options["target"] == "kind"
    assert result.summary.samples == 4 * result.summary.epochs
    assert np.allclose(result.probabilities(table).sum(1), 1)
    assert re.fullmatch(r"Result\(mlp on Table, \d+ epochs?, folder=None\)", repr(result))


def test_the_callers_random_generators_are_left_alone() -> None:
    def draw() -> tuple[float, float, float]:
        return random.random(), float(np.random.random()), torch.rand(1).item()

    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    expected = draw()
    random.seed(3), np.random.seed(3), torch.manual_seed(3)
    tutti.train("mlp", DATA, model_options={"hidden": [4]}, **ONE)
    assert draw() == expected


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"goal": "training loss 1000"}, "training loss was"),
        ({"goal": 1000, "monitor": "validation loss"}, "validation loss was"),
        ({"patience": 1, "monitor": "validation accuracy", "lr": 1e-9}, "validation accuracy was not better"),
    ],
)
def test_a_run_ends_early_by_figures_as_people_write_them(arguments: dict[str, Any], why: str) -> None:
    summary = tutti.train(net(), DATA, **ONE | {"epochs": 9}, **arguments).summary
    assert summary.epochs < 9
    assert str(summary.ended_early).startswith(why)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epoch": 3}, "unknown argument 'epoch'; did you mean 'epochs'?"),
        ({"learning_rate": 1}, "unknown argument 'learning_rate'; did you mean lr? See help(tutti.train)."),
        ({"momentum": 1}, "did you mean optimizer_options={'momentum': ...}?"),
        ({"classes": 3}, "unknown argument 'classes'; give data_options={'classes': ...}"),
        ({"group_by": "p"}, "unknown argument 'group_by'; give data_options={'group': ...}"),
        ({"optimizer": torch.optim.SGD(net().parameters(), lr=0.1)}, "over the parameters of a module"),
        ({"optimizer": lambda parameters: 3}, "must return a torch.optim.Optimizer"),
        ({"model_options": {"hidden": [3]}}, "is built already, so its options (hidden) have no effect"),
        ({"loss": 3}, "loss is 3; give a name or a function"),
        ({"loss": lambda outputs, targets: "x"}, "loss"),
        ({"optimizer": 5}, "optimizer is 5"),
        ({"schedule": lambda optimizer: 5}, "schedule"),
        ({"metrics": [5]}, "metrics is 5"),
        ({"metrics": lambda outputs, targets: "x"}, "metric"),
        ({"time_limit": "1h"}, "time_limit is for a run with a folder"),
        ({"strategy": 3}, "the strategy is 3; give an object, such as tutti.Sync(), or a name"),
        ({"data": None}, "the data is None"),
        ({"model": DATA}, "the model is a tuple; the model comes first"),
        ({"metrics": [random.Random(3).random]}, "metric"),
        ({"batch_size": "many"}, "batch_size is 'many'; give a whole number"),
        ({"lr": -1.0}, "lr is -1.0; give a finite number above 0"),
        ({"class_weights": [1, 2.5]}, "class_weights are 2 numbers, but there are 5 classes"),
        ({"precision": "fp16", "parallel": "pipeline"}, "does not go with precision fp16"),
        ({"epochs": 1, "steps": 1}, "epochs=1 does not go with steps=1"),
        (
            {"data": (INPUTS, torch.arange(120) % 24 * 7)},
            "give data_options={'classes': 'none'} for regression, or data_options={'classes': 24} if",
        ),
        ({"data": (INPUTS, TARGETS % 3 + 1)}, "5 outputs, but the labels have 3 values"),
    ],
)
def test_a_wrong_argument_is_named(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(tutti.UserError, match=re.escape(message)):
        tutti.train(**{"model": net(), "data": DATA, **ONE, **arguments})


def test_with_fp64_inputs_and_targets_are_not_rounded_to_float32() -> None:
    # A model that is exact in float64, of numbers whose differences float32 does not have.
    inputs = 1e8 + torch.linspace(-1, 1, 16, dtype=torch.float64)[:, None]
    targets = 2 * (inputs - 1e8)
    module = nn.Linear(1, 1, dtype=torch.float64)
    with torch.no_grad():
        module.weight.fill_(2.0)
        module.bias.fill_(-2e8)
    data = {"x_train": inputs, "y_train": targets, "x_test": inputs, "y_test": targets}
    options = {"workers": 1, "steps": 1, "batch_size": 16, "optimizer": "sgd", "validation": 0, "quiet": True}
    found = tutti.train(module, data, precision="fp64", **options)
    assert found.summary.test is not None
    assert found.summary.test.loss == 0.0
    assert torch.equal(module.weight, torch.tensor([[2.0]], dtype=torch.float64))


def hits_score(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.argmax(1) == targets


def unnamed(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.argmax(1) == targets


def test_a_custom_metric_ends_a_run_and_restores_the_best_epoch_without_a_folder() -> None:
    how = {"monitor": "val_hits_score", "patience": 2, "restore_best": True}
    result = tutti.train(*(net(), DATA), **{**ONE, "epochs": 20}, lr=0.1, metrics=[hits_score], **how)
    figures = [record.validation.metrics["hits_score"] for record in result.history]
    assert result.summary.ended_early is not None
    assert len(figures) == next(n for n in range(3, 99) if max(figures[n - 2 : n]) <= max(figures[: n - 2]))
    assert result.summary.best_epoch == 1 + figures.index(max(figures))
    assert result.summary.restored
    assert result.summary.validation == result.history[result.summary.best_epoch - 1].validation
    with pytest.raises(tutti.BadOption, match=r"^monitor is 'val_unnamed'"):
        tutti.train(net(), DATA, **ONE, metrics=[unnamed], monitor="val_unnamed", patience=1)


def test_objects_that_cannot_be_pickled_are_refused() -> None:
    with pytest.raises(tutti.BadOption, match=r"data cannot be sent to the ranks.*give a function"):
        tutti.train(net(), (i for i in range(3)), **ONE)


def test_a_script_without_a_guard_trains_on_two_ranks_with_its_own_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, out = tmp_path / "script.py", tmp_path / "out"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [*interpreter(starts_ranks=True), str(script), str(out)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("plan: 2 ranks") == 1
    assert done.stdout.endswith("samples 91 ranks 2\n")
    assert json.loads((out / "config.json").read_text())["model"] == "object:Net"
    assert main(["train", "--config", str(out), "-n", "1", "--trust"]) == 2
    assert "was a Python object of a script" in capsys.readouterr().err


def test_state_that_is_no_tensor_is_refused_before_anything_is_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"count": 3}

        def set_extra_state(self, state: dict[str, int]) -> None:
            assert state == {"count": 3}

    data = torch.utils.data.TensorDataset(torch.randn(8, 2), torch.arange(8) % 2)
    options = {"workers": 1, "validation": 0, "epochs": 1}
    tutti.train(Extra(2, 2), data, **options)
    with pytest.raises(BadModel, match=r"'_extra_state' is a dict; only tensors .* \(out=None\)"):
        tutti.train(Extra(2, 2), data, out=str(tmp_path / "run"), **options)
    assert not (tmp_path / "run").exists()
