"""Every command that the pages show is one that the command line takes."""

from __future__ import annotations

import argparse
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from tutti.cli.command import Command
from tutti.cli.commands import COMMANDS
from tutti.cli.options import config_from, without_auto
from tutti.run.config import Options

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shown() -> list[tuple[str, str]]:
    """The page and the words of each command, in blocks of code and, with options, in sentences."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL):
            found += re.findall(r"^(?:\$ |mpirun -n \d+ )?tutti (.*)$", block, flags=re.MULTILINE)
        found += re.findall(r"`tutti (\w+ [^`.]*--?[^`.]*)`", text)
        found = [(page.name, one) if isinstance(one, str) else one for one in found]
    return found


def test_commands_of_all_kinds_are_found() -> None:
    assert {words.split()[0] for _, words in shown()} >= set(COMMANDS) - {"run", "doctor"}
    assert len(shown()) > 25


@pytest.mark.parametrize(("page", "words"), shown())
def test_a_command_of_a_page_is_parsed_and_its_configuration_has_no_wrong_value(
    page: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *rest = shlex.split(words, comments=True)
    seen: list[tuple[dict[str, Any], dict[str, Options]]] = []

    def note(
        command: Command, own: argparse.Namespace, given: dict[str, Any], dotted: dict[str, Options]
    ) -> int:
        seen.append((given, dotted))
        return 0

    monkeypatch.setattr(COMMANDS[name], "run", note)
    assert COMMANDS[name]()(rest) == 0
    if "--help" in rest:
        return
    ((given, dotted),) = seen
    if name in ("train", "plan", "verify", "layouts"):
        config_from(without_auto(given)[0] if name in ("train", "plan") else given, dotted)
