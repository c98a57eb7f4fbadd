"""A configuration is checked when it is made, and comes back from JSON as it was."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tutti.errors import BadOption, UnknownName
from tutti.run.config import TrainConfig


def test_every_field_says_what_it_is() -> None:
    assert all(f.metadata["help"] for f in fields(TrainConfig))


def test_json_brings_the_same_configuration_back(tmp_path: Path) -> None:
    config = TrainConfig(model="lenet", model_options={"a": [1, 2.5, "x", None, True]}, lr=0.1, epochs=3)
    (tmp_path / "config.json").write_text(json.dumps(config.as_json()))
    assert TrainConfig.read(tmp_path / "config.json") == config
    assert TrainConfig.read(tmp_path) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epochs": "five"}, "--epochs is 'five'; give a whole number"),
        ({"epochs": 2.0}, "--epochs is 2.0; give a whole number"),
        ({"epochs": True}, "--epochs is True; give a whole number"),
        ({"model": 3}, "--model is 3; give a text"),
        ({"model": None}, "--model is None; give a text"),
        ({"lr": "0.1"}, "--lr is '0.1'; give a number"),
        ({"lr": float("inf")}, "--lr is inf"),
        ({"model_options": [1]}, "--model-options is [1]; give a table"),
        ({"model_options": {"act": {"a": 1}}}, "--model.act is {'a': 1}; give a number, a text"),
        ({"batch_size": 0}, "--batch-size is 0; the smallest possible is 1"),
        ({"seed": -1}, "--seed is -1; the smallest possible is 0"),
        ({"workers": "0"}, "--workers is '0'"),
        ({"monitor": 3}, "--monitor is 3; give a text"),
        ({"patience": 0}, "--patience is 0; the smallest possible is 1"),
        ({"time_limit": "90"}, "--time-limit is '90'; give a length of time above 0 with its units"),
        ({"hang_timeout": "0"}, "a length of time above 0 with its units, such as 3h50m, 90s or 2d, or off"),
        ({"hang_timeout": "0s"}, "a length of time above 0 with its units, such as 3h50m, 90s or 2d, or off"),
        ({"time_limit": "0s"}, "--time-limit is '0s'; give a length of time above 0"),
        ({"checkpoint": "never"}, "--checkpoint is 'never'; give an interval, such as 10m"),
        ({"keep": 0}, "--keep is 0; the smallest possible is 1"),
        ({"restore_best": "yes"}, "--restore-best is 'yes'; give true or false"),
        ({"restore_best": 1}, "--restore-best is 1; give true or false"),
        ({"average": "swa:1"}, "--average is 'swa:1'; give a decay below 1"),
        ({"average": "swa:0.5", "parallel": "tensor"}, "--parallel tensor does not go with --average"),
    ],
)
def test_a_value_that_cannot_be_used_is_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(BadOption) as caught:
        TrainConfig.from_json(values)
    assert message in str(caught.value)


def test_an_unknown_key_names_the_nearest_one() -> None:
    with pytest.raises(UnknownName, match="did you mean 'batch_size'"):
        TrainConfig.from_json({"batchsize": 3})


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot read the configuration.*; give the folder of a run"), ("[1]", "holds list, not a table")],
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(BadOption, match=message):
        TrainConfig.read(path)


def test_a_path_object_is_a_path() -> None:
    assert TrainConfig(out=Path("runs") / "first").out == "runs/first"  # type: ignore[arg-type]
