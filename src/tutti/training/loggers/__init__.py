"""The loggers of a run: files of every run folder, and further places by name.

A new logger is a new file here, with a `Logger` named by `@part`. It imports its packages
when a run begins.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from tutti.errors import UnknownName, UserError
from tutti.registry import Registry

if TYPE_CHECKING:
    from tutti.records.run_folder import RunFolder
    from tutti.training.loggers.base import Logger

LOGGERS: Final[Registry[type[Logger]]] = Registry("tutti.training.loggers", "logger")

NONE: Final = "none"


def optional_loggers() -> list[str]:
    """Return the names of the loggers that a run does not have by default."""
    return [name for name, logger in LOGGERS.items() if not logger.always]


def logger_names(text: str) -> tuple[str, ...]:
    """Split a comma-separated list of names; "none" is none."""
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip() not in ("", NONE)))
    optional = optional_loggers()
    for name in names:
        if name not in optional:
            always = " and ".join(name for name in LOGGERS if name not in optional)
            raise UnknownName("logger", name, [*optional, NONE], f"{always} are always written.")
        missing = [need for need in LOGGERS[name].needs() if importlib.util.find_spec(need) is None]
        if missing:
            raise UserError(
                f"--log {name} needs what is not installed here: {', '.join(missing)}; "
                f"install it with: pip install 'tutti[{name}]'"
            )
    return names


def loggers_of(folder: RunFolder, names: Sequence[str]) -> dict[str, Logger]:
    """Make the loggers of a run, by name: the default ones, and those in `names`."""
    return {name: logger(folder) for name, logger in LOGGERS.items() if logger.always or name in names}
