"""Programs of pages use what is there, their commands are parsed, and their links lead somewhere."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

import tutti
from tests.docs.programs import DOCS, blocks_of
from tutti.cli.command import Command
from tutti.cli.commands import COMMANDS
from tutti.cli.options import Words
from tutti.run.api import TrainOptions
from tutti.run.config import TrainConfig
from tutti.strategies import STRATEGIES

ROOT = DOCS.parent
EXAMPLES = ROOT / "examples"
PAGES = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
PROGRAMS = [
    pytest.param(block.code, id=f"{page}-{number}")
    for page in sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    for number, block in enumerate(blocks_of(page))
    if block.language == "python" and block.mark != "theirs"
]


def dotted(node: ast.expr) -> str | None:
    """The name that an expression is, such as `tutti.train`."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else None


def unknown_arguments(call: ast.Call, function: Any) -> list[str]:
    """The keywords of a call that the function does not take."""
    parameters = inspect.signature(function).parameters
    known = set(parameters)
    if function in (tutti.train, tutti.cross_validate, tutti.tune):
        known |= {field.name for field in fields(TrainConfig)} | set(TrainOptions.__annotations__)
    elif any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    return [word.arg for word in call.keywords if word.arg is not None and word.arg not in known]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_of_a_page_is_python_and_uses_what_tutti_has(program: str) -> None:
    tree = ast.parse(program)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tutti":
            assert all(hasattr(import_module(str(node.module)), alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and dotted(node.value) == "tutti":
            assert hasattr(tutti, node.attr)
        elif isinstance(node, ast.Call):
            module, _, name = (dotted(node.func) or "").rpartition(".")
            assert module != "tutti" or unknown_arguments(node, getattr(tutti, name)) == []


def test_a_wrong_argument_would_be_seen() -> None:
    (call,) = (n for n in ast.walk(ast.parse("tutti.train('mlp', epohcs=1)")) if isinstance(n, ast.Call))
    assert unknown_arguments(call, tutti.train) == ["epohcs"]


def shown() -> Iterator[tuple[str, list[str]]]:
    """The words of each command: in blocks of code and sentences of pages, and in files for clusters."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        found = re.findall(r"`tutti (\w+ [^`.]*--?[^`.]*)`", text)
        for block in re.findall(r"```\w*\n(.*?)```", text, flags=re.DOTALL):
            lines = block.replace("\\\n", "")
            found += re.findall(r"^(?:\$ |mpirun -n \d+ )?tutti (.*)$", lines, flags=re.MULTILINE)
        yield from ((page.name, shlex.split(one, comments=True)) for one in found)
    for path in sorted(EXAMPLES.glob("slurm/*.sbatch")):
        (line,) = re.findall(r"^(?:srun .*)?tutti (train .*)$", path.read_text(), re.MULTILINE)
        yield path.name, shlex.split(line.removesuffix("&").replace('"$@"', ""))
    for path in sorted(EXAMPLES.glob("kubernetes/*.yaml")):
        for container in containers(yaml.safe_load(path.read_text())):
            words = [*container["command"], *container.get("args", [])]
            if "tutti" in words:
                yield path.name, words[words.index("tutti") + 1 :]


def containers(part: object) -> list[dict[str, Any]]:
    """All containers in a manifest, however deep they stand in it."""
    if isinstance(part, list):
        return [one for each in part for one in containers(each)]
    if not isinstance(part, dict):
        return []
    return [*part.get("containers", []), *(one for each in part.values() for one in containers(each))]


def test_commands_of_all_kinds_are_found() -> None:
    assert {words[0] for _, words in shown()} >= set(COMMANDS) - {"run", "doctor"}
    assert {name.rpartition(".")[2] for name, _ in shown()} == {"md", "sbatch", "yaml"}


@pytest.mark.parametrize(("page", "words"), list(shown()))
def test_a_command_is_parsed_and_its_configuration_has_no_wrong_value(
    page: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, *rest = words
    seen: list[Words] = []

    def note(command: Command, parsed: Words) -> int:
        seen.append(parsed)
        return 0

    monkeypatch.setattr(COMMANDS[name], "run", note)
    assert COMMANDS[name]()(rest) == 0
    for one in seen:
        if name in ("train", "plan", "verify", "layouts"):
            one.config()


def slugs(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    bare = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in bare}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_of_a_page_leads_to_a_file_and_every_anchor_to_a_heading(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in re.findall(r"\]\(([^()\s#:]*)(?:#([^()\s]+))?\)", prose):
        other = page.parent / target if target else page
        assert other.exists(), target
        assert not anchor or anchor in slugs(other.read_text(encoding="utf-8")), f"{target}#{anchor}"


def test_the_architecture_names_files_that_there_are_and_all_folders() -> None:
    text, package = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"), ROOT / "src" / "tutti"
    homes = (ROOT, package, package / "comm", package / "studies")
    for name in re.findall(r"`((?:[a-z_]+/)*(?:[a-z_]+\.py|[a-z_]+/))`", text):
        assert any((home / name).exists() for home in homes), name
    folders = [path.name for path in package.iterdir() if (path / "__init__.py").exists()]
    assert [name for name in folders if f"`{name}/`" not in text] == []


def test_the_page_of_strategies_has_a_row_for_each_with_its_file() -> None:
    page = DOCS / "choosing-a-strategy.md"
    rows = re.findall(r"^\| \[`(\w+)`\]\((.*?)\)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert {name for name, _ in rows} == set(STRATEGIES)
    assert all((DOCS / path).is_file() and Path(path).stem == name for name, path in rows)
