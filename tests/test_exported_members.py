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


def test_the_supervisor_s_side_imports_neither_torch_nor_mpi() -> None:
    heavy = "[name for name in ('torch', 'mpi4py', 'numpy', 'sklearn') if name in sys.modules]"
    program = [sys.executable, "-c", f"import sys, {', '.join(LIGHT)}; print({heavy})"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_who_hands_out_the_jobs_of_a_farm_needs_no_torch() -> None:
    heavy = "[name for name in ('torch', 'mpi4py') if name in sys.modules]"
    program = [sys.executable, "-c", f"import sys, tutti.cli.cv; print({heavy})"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(("system", "named"), [("darwin", "macOS"), ("win32", "win32")])
@pytest.mark.parametrize("command", [False, True])
def test_on_another_system_one_sentence_says_that_it_runs_on_linux(
    system: str, named: str, command: bool
) -> None:
    program = (
        f"import sys; sys.platform = {system!r}; sys.argv[0] = {'tutti' if command else ''!r}; import tutti"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    last = done.stderr.splitlines()[-1]
    start = "tutti: error: " if command else "ImportError: "
    assert last.startswith(f"{start}tutti runs on Linux, and this is {named}: ")
    assert (done.returncode, len(done.stderr.splitlines()) == 1) == ((2, True) if command else (1, False))


def test_the_public_names_and_their_arguments_are_those_that_are_written_down() -> None:
    # Who changes this list changes the library for its users: see "What may change" in CONTRIBUTING.md.
    assert describe_public() == PUBLIC.read_text(encoding="utf-8").splitlines(), (
        f"if the change is meant, write it down: {sys.executable} -m tests.test_exported_members"
    )


def describe_public() -> list[str]:
    """A line for each public name, with its arguments."""
    names = [name for name in tutti.__all__ if name != "__version__"]
    return [f"{name}({', '.join(_arguments(getattr(tutti, name)))})" for name in names]


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
