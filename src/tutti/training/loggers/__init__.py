"""The loggers of a run: files that every run folder has, and further places by name.

Imports none of the packages that these places need: only their loggers do, when a run begins.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Final

from tutti.errors import UnknownName, UserError

if TYPE_CHECKING:
    from tutti.training.loggers.base import Logger
    from tutti.training.run_folder import RunFolder

ALWAYS: Final = ("jsonl", "csv")
"""The loggers of every run folder."""

NONE: Final = "none"


PLACES: Final = {"tensorboard": ("tensorboard",), "mlflow": ("mlflow", "sqlalchemy", "alembic")}
"""The loggers that are asked for by name, each with the packages that it needs: extras of the same names."""

URI: Final = "MLFLOW_TRACKING_URI"
"""The environment variable that names another store for MLflow than a local data base."""


def logger_names(text: str) -> tuple[str, ...]:
    """The names in a comma-separated list; "none" and nothing are none.

    Raises:
        UnknownName: there is no such logger.
        UserError: a package that it needs is missing.
    """
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip() not in ("", NONE)))
    for name in names:
        if name not in PLACES:
            raise UnknownName("logger", name, [*PLACES, NONE], f"{' and '.join(ALWAYS)} are always written.")
        missing = [package for package in _needs(name) if importlib.util.find_spec(package) is None]
        if missing:
            raise UserError(
                f"--log {name} needs what is not installed here: {', '.join(missing)}; "
                f"install it with: pip install 'tutti[{name}]'"
            )
    return names


def _needs(name: str) -> Sequence[str]:
    """The packages that a logger needs; a server of MLflow has its data base elsewhere."""
    return PLACES[name][:1] if os.environ.get(URI, "").startswith("http") else PLACES[name]


def loggers_of(folder: RunFolder, names: Sequence[str]) -> dict[str, Logger]:
    """The loggers of a run, by name.

    Args:
        folder: the run's.
        names: those asked for, as `logger_names` gave them.
    """
    homes = {name: import_module(f"tutti.training.loggers.{name}") for name in (*ALWAYS, *names)}
    return {name: home.open_logger(folder) for name, home in homes.items()}
