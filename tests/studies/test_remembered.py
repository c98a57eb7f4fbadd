"""The key of a remembered plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tutti.run.config import TrainConfig
from tutti.studies.autotune import remembered
from tutti.studies.autotune.candidates import Candidate, Choices
from tutti.studies.autotune.remembered import RememberedPlan, find, keep, place_of

CHOICES = Choices(((1, 2), (2, 1)), ("fp32",), ("contiguous",), (32,))
FOUND = RememberedPlan(Candidate(2, 1, "fp32", "contiguous", 32), 0.01, 1000, 0.5)


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TUTTI_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"model": "mlp"}, False),
        ({"model_options": {"hidden": 8}}, False),
        ({"data": "mnist"}, False),
        ({"batch_size": 64}, False),
        ({"precision": "bf16"}, False),
        ({"optimizer": "sgd"}, False),
        ({"lr": 0.1}, False),
        ({"strategy": "sync"}, False),
        ({"loss": "mse"}, False),
        ({"augment": "flip"}, False),
        ({"weights": "runs/before"}, False),
        ({"epochs": 3}, True),
        ({"steps": 3}, True),
        ({"seed": 3}, True),
        ({"goal": 0.9, "monitor": "val_accuracy"}, True),
        ({"out": "here"}, True),
        ({"workers": "2", "threads": 1, "layout": "channels_last"}, True),  # among the choices
    ],
)
def test_options_that_change_no_step_keep_the_key(options: dict[str, Any], same: bool) -> None:
    before = place_of(TrainConfig(), CHOICES, (), 2)
    assert (place_of(TrainConfig(**options), CHOICES, (), 2) == before) is same


def test_choices_cores_processor_and_versions_change_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [
        place_of(TrainConfig(), CHOICES, (), 2),
        place_of(TrainConfig(), replace(CHOICES, shapes=((2, 1),)), (), 2),
        place_of(TrainConfig(), CHOICES, ("bf16",), 2),
        place_of(TrainConfig(), CHOICES, (), 4),
    ]
    for name, value in (("cpuinfo", lambda _: "another"), ("versions", lambda: {"torch": "9"})):
        with monkeypatch.context() as patch:
            patch.setattr(remembered, name, value)
            places.append(place_of(TrainConfig(), CHOICES, (), 2))
    assert len(set(places)) == len(places)


@pytest.mark.parametrize(
    ("field", "name", "change"),
    [
        ("model", "own.py:Net", lambda file: file.write_text("class Net: ...")),
        ("loss", "own.py:loss", lambda file: file.write_text("def loss(): ...")),
        ("metrics", "accuracy,own.py:metric", lambda file: file.write_text("def metric(): ...")),
        ("data", "own.csv", lambda file: file.write_text("another length")),
    ],
)
def test_changed_files_change_the_key(
    tmp_path: Path, field: str, name: str, change: Callable[[Path], object]
) -> None:
    config = replace(TrainConfig(), **{field: name})
    file = tmp_path / name.split(",")[-1].partition(":")[0]
    file.write_text("")
    before = place_of(config, CHOICES, (), 2)
    assert before is not None
    assert before == place_of(config, CHOICES, (), 2)
    change(file)
    assert place_of(config, CHOICES, (), 2) != before


@pytest.mark.parametrize(
    "options", [{"model": "package.module:Net"}, {"loss": "none.py:loss"}, {"model": "object:Net"}]
)
def test_plans_with_code_that_may_change_unseen_are_not_remembered(options: dict[str, Any]) -> None:
    place = place_of(TrainConfig(**options), CHOICES, (), 2)
    assert place is None
    keep(place, FOUND)
    assert find(place) is None


def test_a_plan_is_found_and_a_cache_that_cannot_be_written_is_ignored(tmp_path: Path) -> None:
    place = place_of(TrainConfig(), CHOICES, (), 2)
    assert place is not None
    assert find(place) is None
    keep(place, FOUND)
    assert find(place) == FOUND
    assert [file.name for file in place.parent.iterdir()] == [place.name]
    (tmp_path / "file").touch()
    keep(tmp_path / "file" / "plan.json", FOUND)
