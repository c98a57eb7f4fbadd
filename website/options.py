"""Every option of every command and every part, from the parsers and the registries themselves."""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Iterable, Iterator
from dataclasses import fields
from typing import Any, Final

from tutti.cli.commands import COMMANDS
from tutti.registry import Registry
from tutti.strategies import Strategy

_HEADINGS: Final = {"positional arguments": "Arguments", "options": "Options"}


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def overview() -> str:
    """The page that lists the commands."""
    rows = [(f"[`tutti {name}`](options/{name}.md)", COMMANDS.summary(name)) for name in COMMANDS]
    return (
        "# Every option\n\nThese pages are made from the command line itself, so they say what "
        "`tutti COMMAND --help` says. In Python the options of `tutti train` are the arguments of "
        "{py:obj}`tutti.train`, with `_` for `-`.\n\n"
        + table(("command", "what it does"), rows)
        + "\nThe options of models, losses and other parts: [Parts](options/parts.md). Those of a strategy "
        "are on its [page](strategies.md).\n"
    )


def command_page(name: str) -> str:
    """The page of one command."""
    command = COMMANDS[name]()
    parser = command.parser()
    parser.write_help()
    parts = [f"# tutti {name}\n", str(parser.description or "") + "\n"]
    parts += [f"```text\n{command.example}\n```\n"]
    for group in parser._action_groups:
        rows = list(_rows(parser, group._group_actions))
        if rows:
            title = str(group.title or "Options")
            parts.append(f"## {_HEADINGS.get(title, title[0].upper() + title[1:])}\n")
            parts += [group.description + "\n"] if group.description else []
            parts += [f"{shown}\n: {meaning}\n" for shown, meaning in rows]
    return "\n".join(parts)


def _rows(parser: argparse.ArgumentParser, actions: Iterable[argparse.Action]) -> Iterator[tuple[str, str]]:
    formatter = parser._get_formatter()
    for action in actions:
        if action.help is argparse.SUPPRESS or "--help" in action.option_strings:
            continue
        if action.option_strings:
            value = "" if action.nargs == 0 else formatter._format_args(action, (action.dest or "").upper())
            shown = ", ".join(action.option_strings) + (f" {value}" if value else "")
        else:
            shown = str(action.metavar or action.dest)
        meaning = (action.help or "").replace("%%", "%").replace("<", "&lt;").replace("*", "\\*")
        yield f"`{shown}`", meaning


def strategy_options(kind: type[Strategy]) -> str:
    """The table of a strategy's options."""
    rows = [
        (
            f"`--strategy.{field.name.replace('_', '-')}`",
            f"`{field.default}`",
            str(field.metadata.get("help", "")),
        )
        for field in fields(kind)
    ]
    return table(("option", "default", "meaning"), rows) if rows else "It has none.\n"


def parts_page(registries: dict[str, tuple[str, Registry[Any]]]) -> str:
    """The page of all parts that have names.

    Args:
        registries: for each heading the option that takes the name of a part, and the parts.
    """
    parts = [
        "# Parts and their options\n",
        "Every part that is known by a name, with its own options and defaults.\n",
    ]
    for title, (option, registry) in registries.items():
        parts.append(f"## {title}\n")
        parts.append(f"`{option}`\n")
        rows = [(f"`{name}`", registry.summary(name), _defaults(registry[name])) for name in registry]
        parts.append(table(("name", "what it is", "options"), rows))
    return "\n".join(parts)


def _defaults(part: Any) -> str:
    try:
        parameters = inspect.signature(part).parameters.values()
    except (TypeError, ValueError):
        return ""
    shown = [p for p in parameters if p.default is not p.empty and p.name not in ("shape", "outputs")]
    return ", ".join(f"`{p.name}={p.default!r}`" for p in shown)
