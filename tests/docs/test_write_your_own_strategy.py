"""The page's strategy works as the page says."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tutti.cli.main
from tests.contracts import strategy as contract
from tutti.errors import BadOption, UnknownName
from tutti.strategies import Strategy, named

PAGE = Path(__file__).parents[2] / "docs" / "write-your-own-strategy.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(encoding="utf-8"), flags=re.DOTALL)


def setting() -> contract.Setting:
    """What the page says that the checks need to know."""
    names: dict[str, object] = {}
    exec(compile(blocks("python")[2], str(PAGE), "exec"), names)
    found = names["SETTING"]
    assert isinstance(found, contract.Setting)
    return found


SETTING = setting()


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "majority.py"
    path.write_text(blocks("python")[0])
    return path


@pytest.fixture(scope="module")
def strategy(file: Path) -> type[Strategy]:
    before = list(sys.path)
    yield named(f"{file}:MajorityVote")
    sys.path[:] = before


@pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_the_page_s_strategy_does_what_strategies_must(
    check: Callable[[type[Strategy], contract.Setting], None], strategy: type[Strategy]
) -> None:
    check(strategy, SETTING)


def test_the_page_s_program_runs(strategy: type[Strategy]) -> None:
    exec(compile(blocks("python")[1], str(PAGE), "exec"), {"MajorityVote": strategy})


def test_the_page_s_command_trains(
    file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (command,) = blocks("bash")
    words = shlex.split(command.replace("majority.py", str(file)))
    assert words[0] == "tutti"
    assert tutti.cli.main.main([*words[1:], "-n", "2"]) in (0, None)
    accuracy = re.search(r"accuracy\D*([\d.]+)", capfd.readouterr().out.partition("\ntest:")[2])
    assert accuracy
    assert float(accuracy[1]) > 0.8


def test_what_is_no_strategy_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "other.py"
    path.write_text(
        "from tutti.strategies import Strategy\nclass Nothing: pass\nclass Half(Strategy): name = 'half'\n"
    )
    with pytest.raises(BadOption, match=r"is Nothing, which is no subclass"):
        named(f"{path}:Nothing")
    with pytest.raises(BadOption, match=r"says nothing about: home, worker"):
        named(f"{path}:Half")
    with pytest.raises(UnknownName, match=r"file\.py:Class"):
        named("esgd")
