"""The arguments that `tutti.cross_validate` and `tutti.tune` share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
from torch.optim import Optimizer
from torch.utils.data import Dataset

from tutti.data.arrays import keeping_doubles
from tutti.data.columns import Stored
from tutti.data.contents import Contents, to_keys
from tutti.data.rows import Array, Rows
from tutti.data.sources import read_source
from tutti.data.targets import meant_by
from tutti.errors import BadOption, RunStopped
from tutti.farm.coordinator import FarmOutcome
from tutti.load_object import call_with_options
from tutti.records.farm_folder import DATA
from tutti.run.api import TrainOptions, refuse_built, refuse_unknown, spell, weights_of, without_loaders
from tutti.run.build import seeded
from tutti.run.config import Options, TrainConfig, with_defaults
from tutti.run.pickled import Pickled
from tutti.run.pickled_arguments import by_name
from tutti.strategies import Strategy
from tutti.studies.farms import Blocks
from tutti.terminal import lasting_output


class StudyOptions(TrainOptions, total=False):
    """The `**options` of `tutti.cross_validate` and `tutti.tune`."""

    strategy: str | Strategy | None
    optimizer: str | Callable[..., Optimizer] | None
    loss: str | Callable[..., Any]
    metrics: str | Callable[..., Any] | Sequence[str | Callable[..., Any]]
    sampling: object
    augment: str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None
    block: int
    blocks: int | None
    job_timeout: str | None
    resume: bool
    quiet: bool


@dataclass(frozen=True)
class Arguments:
    """The arguments of a study in Python."""

    config: TrainConfig  # shared by all runs
    contents: Contents[Stored[Rows], Array] | None  # of data given as an object; None: data have a name
    objects: dict[str, Pickled]  # Python objects, as in a `Job`
    blocks: Blocks
    out: str | None  # the folder of the farm; None: the default one
    resume: bool
    quiet: bool

    @classmethod
    def of(cls, function: str, data: object, options: StudyOptions, **given: object) -> Arguments:
        """Check the arguments, and read data given as an object or a function."""
        left: dict[str, Any] = dict(options)
        refuse_unknown(left, StudyOptions.__annotations__, function)
        out, limit, threads = (left.pop(name, None) for name in ("out", "time_limit", "threads"))
        block, blocks = left.pop("block", 1), left.pop("blocks", None)
        timeout = left.pop("job_timeout", None)
        resume, quiet = (left.pop(name, False) for name in ("resume", "quiet"))
        if resume and out is None:
            raise BadOption("resume=True needs out: the folder of the farm to continue")
        given = {
            "strategy": left.pop("strategy", None) or "auto",
            **({"optimizer": one} if (one := left.pop("optimizer", None)) else {}),
            "loss": left.pop("loss", "auto"),
            "metrics": left.pop("metrics", "auto"),
            "sampling": weights_of(left.pop("sampling", None)),
            "augment": left.pop("augment", None),
            **given,
        }
        refuse_built(given.get("optimizer"))
        data = without_loaders(data, cast("TrainOptions", left), quiet)
        spell(cast("TrainOptions", left))
        values, objects = by_name(given)
        config, contents = _opened(data, TrainConfig.from_json(with_defaults({**values, **left})))
        return cls(
            config, contents, objects, Blocks.of(block, blocks, threads, timeout, limit), out, resume, quiet
        )

    @property
    def arrays(self) -> dict[str, Array] | None:
        """The data as the arrays of an NPZ file; None: their name is enough."""
        if self.contents is None:
            return None
        found = to_keys(replace(self.contents, columns=()))
        kept = {key: rows[:] if rows.ndim else np.asarray(rows) for key, rows in found.items()}
        if self.contents.groups is not None:
            kept["groups"] = np.unique(self.contents.groups, return_inverse=True)[1]
        return kept

    @contextmanager
    def stream(self) -> Iterator[IO[str]]:
        """Yield the stream that the study prints to."""
        with lasting_output(), open(os.devnull, "w") as nothing:
            yield nothing if self.quiet else sys.stdout


def refuse_stopped(study: str, outcome: FarmOutcome | None, folder: Path) -> None:
    """Raise if the work on a study was stopped."""
    if outcome is not None and outcome.stopped is not None:
        how = f"continue with resume=True and out={str(folder)!r}"
        raise RunStopped(f"the {study} was stopped: {outcome.stopped}; {how}")


def _opened(data: object, config: TrainConfig) -> tuple[TrainConfig, Contents[Stored[Rows], Array] | None]:
    """Read the data, unless the ranks can read them by name."""
    if isinstance(data, str | os.PathLike):
        return replace(config, data=os.fspath(data)), None
    with seeded(config.seed), keeping_doubles(config.precision == "fp64"):
        options = config.data_options
        if callable(data) and not isinstance(data, Dataset):
            data, options = call_with_options(data, options, "data set", "data"), {}
        contents = read_source(data, options, meant_by(config.loss))
    kept: Options = {"classes": contents.classes or "none"}
    if contents.filled:
        kept["missing"] = "mean"
    if contents.groups is not None:
        kept["group"] = "groups"
    return replace(config, data=DATA, data_options=kept), contents
