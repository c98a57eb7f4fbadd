"""Consent to code that a configuration names. Needs no torch.

A configuration may name a module or a file of Python, which runs when it is loaded, and the file of a whole
model, which may run code. What the command line names runs; what a file names needs `--trust`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from tutti.errors import UserError
from tutti.load_object import names_object
from tutti.models import names_file
from tutti.records.texts import printable

HOSTS: Final = "hosts"
"""The field that has programs started on other machines."""

PLAIN: Final = ("split", "out", "time_limit", "checkpoint", "hang_timeout", "strategy.centre")
"""The fields whose texts may have a colon, and are never loaded, such as `splits.npz:0` or `host:7070`."""


class Untrusted(UserError):
    """A configuration file that would run code."""


def code_named(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts that name code, by their fields, such as {"model": "mine.py:net"}."""
    return dict(found for field, value in config.items() for found in _named(field, value))


def _named(field: str, value: object) -> Iterator[tuple[str, str]]:
    if field in PLAIN:
        return
    if isinstance(value, Mapping):
        part = field.removesuffix("_options")
        for key, item in value.items():
            yield from _named(f"{part}.{key}", item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _named(field, item)
    elif isinstance(value, str) and (
        field == HOSTS or names_file(value) or any(map(names_object, map(str.strip, value.split(","))))
    ):
        yield field, value


def check(path: Path, config: Mapping[str, Any], replaced: Collection[str] = ()) -> None:
    """Refuse a configuration that names code."""
    kept = {field: value for field, value in config.items() if field not in replaced}
    # A Python object was not kept; loading it raises its own error.
    left = {field: name for field, name in code_named(kept).items() if not name.startswith("object:")}
    if left:
        listed = ", ".join(f"{printable(field)} '{printable(name)}'" for field, name in left.items())
        raise Untrusted(
            f"{path} would run code: {listed}. Look at that code, then give --trust (in Python "
            "trust=True) if it may run"
        )
