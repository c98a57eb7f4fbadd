"""The page on estimators of scikit-learn: its program finds what it searches for."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from tutti.sklearn.estimators import Estimator

PAGE = (Path(__file__).parents[2] / "docs" / "scikit-learn.md").read_text(encoding="utf-8")


def test_the_program_of_the_page_finds_a_network_that_reads_digits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(program, "page", "exec"), names)
    search = names["search"]
    assert search.best_params_["classifier__lr"] == 0.01  # type: ignore[attr-defined]
    assert search.best_score_ > 0.85  # type: ignore[attr-defined]
    assert capsys.readouterr().out.splitlines()[-1].startswith("[[")


def test_every_parameter_is_explained_and_those_on_the_page_are_there() -> None:
    parameters = set(inspect.signature(Estimator).parameters)
    explained = re.findall(r"^        (\w+): ", (Estimator.__doc__ or "").partition("Attributes:")[0], re.M)
    assert explained == list(inspect.signature(Estimator).parameters)
    named = set(re.findall(r"^- `(\w+)`", PAGE, flags=re.M))
    assert {"model", "loss", "random_state"} <= named <= parameters
