"""The names in a configuration, looked up without torch: before ranks are started, and on every rank."""

from __future__ import annotations

from typing import Final

from tutti.data.schemas import check_data
from tutti.launch.launcher import Launcher, started_by
from tutti.load_object import find_file, names_object, require_packages
from tutti.models import names_file
from tutti.parts import AUGMENTATIONS, CONSTANT, METRICS, SCHEDULES, find_schedule
from tutti.records.texts import TOP, better_by_name
from tutti.run.config import PARTS, TrainConfig
from tutti.run.jobs import Recipe
from tutti.training.loggers import logger_names
from tutti.training.stopping import LOSS, Goal, Monitor

CODE: Final = (*PARTS, "callbacks")
"""The fields that may name Python files."""


def check_here(recipe: Recipe, reads: bool = True) -> None:
    """Raise UserError for mistakes that this machine can find before ranks are started."""
    config = recipe.config
    if started_by().launcher is not Launcher.ALONE:
        return  # Each of several processes would print it.
    check_names(recipe)
    if config.hosts is not None:
        return  # Other machines have the files and packages.
    check_files(config)
    if "data" not in recipe.objects and not names_object(config.data):
        check_data(config.data, config.data_options, reads)


def check_names(recipe: Recipe) -> None:
    """Refuse unknown names, except of data, and unknown options of parts; load no object of the user."""
    config, objects = recipe.config, recipe.objects
    for field in ("model", "strategy", "optimizer", "loss"):
        name = str(getattr(config, field))
        if field == "strategy" and name == "auto":
            name = "sync"
        if field not in objects and not names_object(name) and name != "auto":
            name = name.lower() if field == "optimizer" else name
            PARTS[field].check(name)
            if not names_file(name):
                PARTS[field].check_options(name, getattr(config, f"{field}_options"))
    schedule = config.schedule
    if schedule is not None and "schedule" not in objects and not names_object(schedule):
        full, _ = find_schedule(schedule)
        known = () if full == CONSTANT else SCHEDULES.options(full)
        SCHEDULES.check_options(schedule, config.schedule_options, known)
    for metric in [] if "metrics" in objects else words_of(config.metrics):
        if not (names_object(metric) or metric in ("auto", "none") or TOP.fullmatch(metric)):
            METRICS.check(metric)
    for augmentation in [] if "augment" in objects else words_of(config.augment or ""):
        if not names_object(augmentation):
            AUGMENTATIONS.check(augmentation)
    logger_names(config.log)
    if "metrics" not in objects and (better := _better_of(config.metrics)) is not None:
        # Whether there is a validation part shows when there are samples.
        monitor = Monitor.parse(config.monitor, better, validated=True)
        if config.goal is not None:
            Goal.parse(config.goal, monitor, better, validated=True)


def _better_of(metrics: str) -> dict[str, str | None] | None:
    """Return whether "lower" or "higher" values of each metric are better; None: a name is not known yet."""
    names = (
        list(METRICS) if metrics.strip() == "auto" else [one for one in words_of(metrics) if one != "none"]
    )
    if not all(name in METRICS or TOP.fullmatch(name) for name in names):
        return None
    return {name: better_by_name(name) for name in [*names, LOSS]}


def words_of(text: str) -> list[str]:
    """Return the names between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def check_files(config: TrainConfig) -> None:
    """Refuse files that the configuration names but this machine does not have."""
    for field in CODE:
        for name in words_of(str(getattr(config, field))):
            where = name.rpartition(":")[0]
            if where.endswith(".py"):
                find_file(where, name, field)
    if names_file(config.model):
        find_file(config.model, config.model, "model")
        if config.model.endswith(".keras"):
            require_packages("files of Keras need", ["keras"], "keras")
