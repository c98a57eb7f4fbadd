"""Every option of every command and every part, from the parsers and the registries themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

from tutti.cli.commands import COMMANDS
from tutti.registry import Registry
from tutti.strategies import Strategy


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    """A table in Markdown."""
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def overview() -> str:
    """The page that lists the commands."""
    rows = [(f"[`tutti {name}`](options/{name}.md)", COMMANDS.summary(name)) for name in COMMANDS]
    return (
        "# Every option\n\nThese pages are made from the command line itself, so they say what "
        "`tutti COMMAND --help all` says. In Python the options of `tutti train` are the arguments of "
        "{py:obj}`tutti.train`, with `_` for `-`.\n\n"
        + table(("command", "what it does"), rows)
        + "\nThe options of models, losses and other parts: [Parts](options/parts.md). Those of a strategy "
        "are on its [page](strategies.md).\n"
    )


def command_page(name: str) -> str:
    """The page of one command: its help."""
    command = COMMANDS[name]()
    return (
        f"# tutti {name}\n\n```text\n{command.example}\n```\n\n```text\n{command.parser().format_help()}```\n"
    )


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
