"""Data that a study is given as Python objects: read once, and kept in the farm for all of its jobs."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from torch.utils.data import Dataset

from tutti.data.arrays import keeping_doubles
from tutti.data.columns import Stored
from tutti.data.contents import Contents, to_keys
from tutti.data.rows import Array, Rows
from tutti.data.sources import read_source
from tutti.load_object import call_with_options
from tutti.records.farm_folder import DATA
from tutti.run.build import seeded
from tutti.run.config import Options, TrainConfig


@dataclass(frozen=True)
class GivenData:
    """The data of a study, by the name that its configurations have for them.

    Attributes:
        config: with data of that name.
        contents: what was given as an object, or by a function; None: a name or a path was.
    """

    config: TrainConfig
    contents: Contents[Stored[Rows], Array] | None

    @classmethod
    def of(cls, data: object, config: TrainConfig) -> GivenData:
        """Read data, unless the ranks can do so by their name.

        Raises:
            UserError: they cannot be read.
        """
        if isinstance(data, str | os.PathLike):
            return cls(replace(config, data=os.fspath(data)), None)
        with seeded(config.seed), keeping_doubles(config.precision == "fp64"):
            options = config.data_options
            if callable(data) and not isinstance(data, Dataset):
                data, options = call_with_options(data, options, "data set", "data"), {}
            contents = read_source(data, options)
        kept: Options = {"classes": contents.classes} if contents.classes is not None else {}
        if contents.filled:
            kept["missing"] = "mean"
        return cls(replace(config, data=DATA, data_options=kept), contents)

    @property
    def arrays(self) -> dict[str, Array] | None:
        """The data as the arrays of an NPZ file; None: their name is enough."""
        if self.contents is None:
            return None
        found = to_keys(replace(self.contents, classes=None, columns=()))
        return {key: rows[:] for key, rows in found.items()}
