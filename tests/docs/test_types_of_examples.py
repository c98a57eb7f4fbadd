"""What the README shows, and what users write in its manner, passes a strict type checker of theirs."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest

from tutti.run.api import TrainOptions, train
from tutti.run.config import TrainConfig

pytest.importorskip("mypy")

ROOT = Path(__file__).parents[2]
SETTINGS = """
[mypy]
strict = True

[mypy-own_loop]
# torch has no types for Tensor.backward.
disallow_untyped_calls = False

[mypy-sklearn.*]
ignore_missing_imports = True

[mypy-tutti.*]
follow_imports = silent

[mypy-{skipped}]
follow_imports = skip
"""
SKIPPED = (
    "alembic",
    "altair",
    "mlflow",
    "optuna",
    "pydantic",
    "sqlalchemy",
    "sympy",
    "torch._dynamo",
    "torch._functorch",
    "torch._inductor",
    "torch._export",
    "torch.onnx",
    "torch.testing",
)
"""What no type that users see comes from, and what mypy would read for most of its time."""

MISTAKES = """
import torch
import tutti

tutti.train("mlp", epohcs=1)
tutti.train("mlp", epochs="5")
tutti.train("mlp", strategy=tutti.Sync(evry=3))
model, optimizer = tutti.distribute(torch.nn.Linear(2, 2), torch.optim.SGD([], lr=0.1))
model.in_features + optimizer
"""


def blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> list[str]:
    """What mypy says of the README's blocks, of the loop that it shows, and of mistakes."""
    folder = tmp_path_factory.mktemp("user")
    (folder / "settings.ini").write_text(SETTINGS.format(skipped=",".join(f"{name}.*" for name in SKIPPED)))
    (folder / "mistakes.py").write_text(MISTAKES)
    (folder / "own_loop.py").write_text((ROOT / "examples" / "own_loop.py").read_text(encoding="utf-8"))
    for number, block in enumerate(blocks("README.md")):
        (folder / f"readme{number}.py").write_text(block)
    kept = request.config.cache.mkdir("mypy") if request.config.cache is not None else folder / "kept"
    names = sorted(path.name for path in folder.glob("*.py"))
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--config-file",
        "settings.ini",
        "--cache-dir",
        str(kept),
        *names,
    ]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert not done.stderr
    assert names[-1] == "readme0.py"
    return [line for line in done.stdout.splitlines() if ": error: " in line]


@pytest.mark.timeout(300)
def test_what_the_readme_shows_passes_mypy_strict(said: list[str]) -> None:
    assert [line for line in said if not line.startswith("mistakes.py")] == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("line", "word"), [(5, '"epohcs"'), (6, '"epochs"'), (7, '"evry"'), (9, '"int" and "SGD"')]
)
def test_a_mistake_is_one_for_mypy_and_its_line_is_named(said: list[str], line: int, word: str) -> None:
    (found,) = [one for one in said if one.startswith(f"mistakes.py:{line}: ")]
    assert word in found


def test_the_options_that_type_checkers_know_are_the_fields_of_a_configuration() -> None:
    rest = {field.name for field in fields(TrainConfig)} - set(inspect.signature(train).parameters)
    assert set(TrainOptions.__annotations__) == rest | {"target"}  # one of the options of tables
