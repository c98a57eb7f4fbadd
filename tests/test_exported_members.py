"""The public namespace: what is promised is there, and importing it is cheap."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tutti

PUBLIC = Path(__file__).with_name("public_names.txt")

LIGHT = (
    "tutti",
    "tutti.cli.main",
    "tutti.cli.commands",
    "tutti.cli.train",
    "tutti.cli.evaluate",
    "tutti.cli.verify",
    "tutti.cli.doctor",
    "tutti.errors",
    "tutti.records.run",
    "tutti.run.config",
    "tutti.run.jobs",
    "tutti.launch.placement",
    "tutti.launch.start",
    "tutti.launch.supervisor",
)


@pytest.mark.parametrize("name", tutti.__all__)
def test_every_public_name_can_be_used(name: str) -> None:
    assert getattr(tutti, name) is not None


def test_names_are_known_before_their_use() -> None:
    assert set(tutti.__all__) <= set(dir(tutti))


def test_the_strategies_that_can_be_imported_from_tutti_are_those_of_the_registry() -> None:
    from tutti.strategies import STRATEGIES, Strategy

    exported = [getattr(tutti, name) for name in tutti.__all__]
    ours = [one for one in exported if isinstance(one, type) and issubclass(one, Strategy)]
    named = [one for one in ours if one is not Strategy]
    assert len(named) >= 13
    assert all(STRATEGIES[one.name] is one for one in named)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'tran'"):
        _ = tutti.tran


@pytest.mark.parametrize(
    ("modules", "heavy"),
    [(LIGHT, ("torch", "mpi4py", "numpy", "sklearn")), (("tutti.cli.cv",), ("torch", "mpi4py"))],
)
def test_the_supervisor_s_side_imports_neither_torch_nor_mpi(
    modules: tuple[str, ...], heavy: tuple[str, ...]
) -> None:
    program = f"import sys, {', '.join(modules)}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_another_system_is_refused_in_a_sentence() -> None:
    program = "import sys; sys.platform = 'darwin'; import tutti"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1].startswith("ImportError: tutti runs on Linux, and this is macOS: ")


def test_the_public_names_and_their_arguments_are_those_that_are_written_down() -> None:
    # Who changes this list changes the library for its users: see "What may change" in CONTRIBUTING.md.
    assert describe_public() == sorted(PUBLIC.read_text(encoding="utf-8").splitlines()), (
        f"if the change is meant, write it down: {sys.executable} -m tests.test_exported_members"
    )


def describe_public() -> list[str]:
    """A line for each public name, with its arguments."""
    names = [name for name in tutti.__all__ if name != "__version__"]
    return sorted(f"{name}({', '.join(_arguments(getattr(tutti, name)))})" for name in names)


def _arguments(value: Callable[..., object]) -> list[str]:
    """The arguments with a mark at those that have a default."""
    if isinstance(value, type) and issubclass(value, Exception) and value.__init__ is Exception.__init__:
        return ["message"]
    kinds = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    return [
        f"{kinds.get(one.kind, '')}{one.name}{'' if one.default is one.empty else '?'}"
        for one in inspect.signature(value).parameters.values()
    ]


if __name__ == "__main__":
    PUBLIC.write_text("\n".join(describe_public()) + "\n", encoding="utf-8")
