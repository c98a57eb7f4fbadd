"""The loggers of a run: files of every run folder, and further places by name.

A new logger is a new file here, with a `Logger` named by `@part`. It imports its packages when a run begins.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import ClassVar, Final

from tutti.errors import TuttiError, UnknownName, UserError
from tutti.load_object import require_packages
from tutti.records.json_lines import Json
from tutti.records.run import EpochRecord, Evaluation, Summary
from tutti.records.run_folder import RunFolder
from tutti.registry import Registry

LOGGERS: Final[Registry[type[Logger]]] = Registry("tutti.training.loggers", "logger")

NONE: Final = "none"


class Logger(ABC):
    """A destination of a run's figures; only rank 0 has one.

    The calls come in the order `begin`, `go_on` if the run is resumed, `epoch`..., and `end` or `stop`.

    Attributes:
        always: whether every run has this logger.
    """

    always: ClassVar[bool] = False

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder

    @classmethod
    def needs(cls) -> Sequence[str]:
        """Return the packages that it needs; the extra of its name installs them."""
        return ()

    def begin(self, config: Json) -> None:
        """The run with the resolved configuration `config` begins."""
        return

    def go_on(self, records: Sequence[EpochRecord]) -> None:
        """The run continues after these epochs, which may be logged already."""
        for record in records:
            self.epoch(record)

    @abstractmethod
    def epoch(self, record: EpochRecord) -> None:
        """An epoch has ended."""

    def end(self, summary: Summary | None) -> None:
        """The run has ended; if it has failed, `summary` is None."""
        return

    def stop(self) -> None:
        """The run has stopped, to be resumed another time."""
        self.end(None)


class Logbook:
    """All loggers of a run, open for the block.

    A logger that fails when the run begins is an error. One that fails later causes a warning, and is
    dropped: hours of training are worth more than a figure.
    """

    def __init__(self, loggers: Mapping[str, Logger], config: Json) -> None:
        self._loggers, self._config = dict(loggers), config
        self._summary: Summary | None = None
        self._stopped = False

    def __enter__(self) -> Logbook:
        for name, logger in self._loggers.items():
            try:
                logger.begin(self._config)
            except TuttiError:
                raise
            except Exception as error:
                raise UserError(
                    f"logger {name} cannot begin ({type(error).__name__}: {error}); fix that, or train "
                    f"without --log {name}"
                ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._stopped and error is None:
            self._each(lambda logger: logger.stop())
        else:
            self._each(lambda logger: logger.end(self._summary if error is None else None))

    def go_on(self, records: Sequence[EpochRecord]) -> None:
        """The run continues after these epochs."""
        self._each(lambda logger: logger.go_on(records))

    def epoch(self, record: EpochRecord) -> None:
        """An epoch has ended."""
        self._each(lambda logger: logger.epoch(record))

    def finish(self, summary: Summary) -> None:
        """Keep the summary for the loggers, which get it at the end of the block."""
        self._summary = summary

    def stop(self) -> None:
        """Note that the run has stopped, for the loggers at the end of the block."""
        self._stopped = True

    def _each(self, call: Callable[[Logger], None]) -> None:
        for name, logger in list(self._loggers.items()):
            try:
                call(logger)
            except Exception as error:
                del self._loggers[name]
                what = f"logger {name} failed ({type(error).__name__}: {error}); the run continues without it"
                print(f"tutti: warning: {what}", file=sys.stderr, flush=True)


def figures_of(record: EpochRecord) -> dict[str, float]:
    """Return the figures of an epoch by name, such as "train/loss"; stage seconds are sums over ranks."""
    found = {"epoch": float(record.epoch), **evaluation_figures("train", record.train)}
    found |= evaluation_figures("validation", record.validation)
    found |= {"samples_per_s": record.samples_per_s, "lr": record.lr}
    found |= {f"seconds/{name}": seconds for name, seconds in record.seconds.items()}
    for rank in record.ranks:
        for stage, seconds in rank.stages.items():
            found[f"stages/{stage}"] = found.get(f"stages/{stage}", 0.0) + seconds
    return found


def evaluation_figures(part: str, evaluation: Evaluation | None) -> dict[str, float]:
    """Return loss and metrics of a part of the data, by name; none without an evaluation."""
    if evaluation is None:
        return {}
    figures = {"loss": evaluation.loss, **evaluation.metrics}
    return {f"{part}/{name}": value for name, value in figures.items()}


def hyper_parameters(config: Json) -> dict[str, str | float]:
    """Return a configuration as a flat table, with "part_options.name" and without Nones."""
    options: dict[str, str | float] = {}
    for name, value in config.items():
        if isinstance(value, dict):
            options |= {f"{name}.{key}": item for key, item in hyper_parameters(value).items()}
        elif isinstance(value, bool | int | float | str):
            options[name] = value
        elif value is not None:
            options[name] = str(value)
    return options


def optional_loggers() -> list[str]:
    """Return the names of the loggers that a run does not have by default."""
    return [name for name, logger in LOGGERS.items() if not logger.always]


def logger_names(text: str) -> tuple[str, ...]:
    """Split a comma-separated list of logger names; "none" gives an empty tuple."""
    names = tuple(dict.fromkeys(word.strip() for word in text.split(",") if word.strip() not in ("", NONE)))
    optional = optional_loggers()
    for name in names:
        if name not in optional:
            always = " and ".join(name for name in LOGGERS if name not in optional)
            raise UnknownName("logger", name, [*optional, NONE], f"{always} are always written.")
        require_packages(f"--log {name} needs", LOGGERS[name].needs(), name)
    return names


def loggers_of(folder: RunFolder, names: Sequence[str]) -> dict[str, Logger]:
    """Make the loggers of a run, by name: the default ones, and those in `names`."""
    return {name: logger(folder) for name, logger in LOGGERS.items() if logger.always or name in names}
