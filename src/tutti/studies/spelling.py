"""Options of the commands that train many runs, as a caller in Python writes them.

`tutti.run.arguments` knows the options of a single run, which these commands have too; where both have one
of the same name, such as `--resume`, that of the command is meant.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from tutti.errors import UserError
from tutti.run.arguments import in_python

FARM: Final = {
    "resume": "resume=True",
    "block": "workers",
    "blocks": "blocks",
    "job-timeout": "job_timeout",
}
"""The options of all of them, without their dashes, as arguments."""

CV: Final = {
    **FARM,
    "folds": "cv",
    "stratified": "the stratified splitter",
    "group-by": "groups",
    "score": "score",
    "sweep": "sweep",
}
"""Those of `tutti cv`, as arguments of `tutti.cross_validate`."""

TUNE: Final = {
    **FARM,
    "stratified": "stratified=True",
    **{name: name for name in ("folds", "objective", "pruner", "sampler", "trials")},
    **{name: name for name in ("storage", "space")},
}
"""Those of `tutti tune`, as arguments of `tutti.tune`."""


def spelled(message: str, options: Mapping[str, str]) -> str:
    """Return a message with options as arguments; other words stay as they are.

    Args:
        message: as the command line has it.
        options: the command's own, their names without dashes, and what to write for each.
    """
    pattern = rf"(?<![\w-])--({'|'.join(options)})(?:\.([a-z][\w.]*\w))?(?![\w-])"

    def argument(found: re.Match[str]) -> str:
        name, key = options[found[1]], found[2]
        return name if key is None else f"{name}['{key}']"

    return in_python(re.sub(pattern, argument, message))


@contextmanager
def as_arguments_of(options: Mapping[str, str]) -> Iterator[None]:
    """Spell these options, and those of a single run, in a `UserError` as arguments."""
    try:
        yield
    except UserError as error:
        error.args = tuple(spelled(one, options) if isinstance(one, str) else one for one in error.args)
        raise
