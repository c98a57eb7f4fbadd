"""Options in messages, in the form of Python arguments.

Messages write options as the command line does, `--batch-size 24`. A caller in Python reads `batch_size=24`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Final

from tutti.errors import UserError
from tutti.run.config import TrainConfig

_OF_STUDIES: Final = {
    *("block", "blocks", "job_timeout", "sweep", "group_by"),
    *("strategies", "network", "machine", "price", "scaling", "timing"),
}
_OF_TRAIN: Final = frozenset({f.name for f in fields(TrainConfig)} | {"trace", "resume", "n"} | _OF_STUDIES)

_QUOTED: Final = re.compile(r"'(-[^']*)'")
_OPTION: Final = re.compile(
    r"(?<![\w-])--?(n(?= \d)|(?<=--)[a-z][a-z-]*)(?:\.([a-z][a-z_-]*))?"
    r"(?: (-?\d\S*\b|[A-Z,]*[A-Z]\b|(?:none|true|false|drop|mean|off|worker|gpipe)\b))?"
)


def in_python(message: str, known: Collection[str] = _OF_TRAIN) -> str:
    """Return a message with the known options as arguments; other words stay as they are."""

    def argument(match: re.Match[str]) -> str:
        name, key = match[1].replace("-", "_"), (match[2] or "").replace("-", "_")
        value = {"true": "True", "false": "False"}.get(match[3], match[3] or "")
        value = repr(value) if value.islower() and value.isalpha() else value
        if name not in known:
            return match[0]
        if key and key != "target":
            value = f"[{value}]" if "," in value else value
            return f"{name}_options={{'{key}': {value or '...'}}}"
        return (key or {"n": "workers"}.get(name, name)) + (f"={value}" if value else "")

    return _OPTION.sub(argument, _QUOTED.sub(r"\1", message))


@contextmanager
def as_arguments() -> Iterator[None]:
    """Spell the options in a `UserError` as arguments of `tutti.train`."""
    try:
        yield
    except UserError as error:
        error.args = tuple(in_python(one) if isinstance(one, str) else one for one in error.args)
        raise
