"""The help on the hyper-parameters of the strategy that the command line names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from textwrap import fill

WIDTH = 100
COLUMN = 30


def strategy_help(words: Sequence[str]) -> str:
    """The options of the strategy that `--strategy` names, or how to see those of one.

    Args:
        words: the command line.

    Raises:
        UnknownName: there is no such strategy.
        BadOption: what is named cannot be imported, or is no strategy.
    """
    name = _value_of("--strategy", words)
    if name is None:
        return "'--strategy NAME --help' explains the options of a strategy.\n"
    from tutti.strategies import named

    kind = named(name)
    lines = [f"options of strategy {kind.name}:"]
    for field in fields(kind):
        text = f"{field.metadata.get('help', 'no description')} (default: {field.default})"
        flag = f"  --strategy.{field.name.replace('_', '-')} VALUE"
        lead = f"{flag:{COLUMN - 2}}  " if len(flag) <= COLUMN - 2 else f"{flag}\n{'':{COLUMN}}"
        lines.append(lead + fill(text, WIDTH - COLUMN, subsequent_indent=" " * COLUMN))
    if len(lines) == 1:
        lines.append("  it has none")
    return "\n".join(lines) + "\n"


def _value_of(flag: str, words: Sequence[str]) -> str | None:
    """Return the word after the flag on the command line."""
    for at, word in enumerate(words):
        name, given, value = word.partition("=")
        if name == flag and given:
            return value
        if name == flag and at + 1 < len(words) and not words[at + 1].startswith("-"):
            return words[at + 1]
    return None
