"""Names that texts list by hand, where the registries cannot be imported, are those of the registries."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from tutti.run import arguments
from tutti.run.config import TrainConfig, help_of
from tutti.strategies import STRATEGIES
from tutti.training.loggers import optional_loggers

ROOT = Path(__file__).parents[2]
HELP = {field.name: help_of(field) for field in fields(TrainConfig)}


def words(text: str) -> set[str]:
    return set(re.findall(r"[a-z][a-z0-9_-]*", text))


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("strategy", STRATEGIES),
        ("log", dict.fromkeys(optional_loggers())),
    ],
    ids=["strategy", "log"],
)
def test_the_help_of_an_option_lists_all_names_one_after_the_other(
    option: str, names: dict[str, object]
) -> None:
    listed = re.findall(r"\w+(?:, \w+)+(?=,|$)", HELP[option])
    assert set(names) in [set(one.split(", ")) for one in listed]


@pytest.mark.parametrize(
    ("option", "names"),
    [
        ("strategy", STRATEGIES),
        ("log", dict.fromkeys(optional_loggers())),
    ],
    ids=["strategy", "log"],
)
def test_values_that_python_is_told_of_are_all_names(option: str, names: dict[str, object]) -> None:
    assert set(arguments._NAMES[option].split("|")) == set(names)


def test_the_readme_has_a_row_for_every_strategy_with_its_file() -> None:
    rows = re.findall(
        r"^\| (`\w+`(?:, `\w+`)*) \|.*?\[(\w+\.py)\]\((src/[\w/.]+)\)", (ROOT / "README.md").read_text(), re.M
    )
    assert {name for names, *_ in rows for name in words(names)} == set(STRATEGIES)
    for names, label, path in rows:
        assert (ROOT / path).is_file()
        assert Path(path).name == label == f"{names.split('`')[1]}.py"
