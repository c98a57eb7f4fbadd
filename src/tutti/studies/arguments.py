"""The arguments of `tutti.cross_validate` and `tutti.tune`: what both do with them before they ask."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch.utils.data import Dataset

from tutti.data.arrays import keeping_doubles
from tutti.data.columns import Stored
from tutti.data.contents import Contents, to_keys
from tutti.data.rows import Array, Rows
from tutti.data.sources import read_source
from tutti.errors import BadOption, UnknownName
from tutti.farm.block_placement import place_blocks
from tutti.load_object import call_with_options
from tutti.records.farm_folder import DATA
from tutti.run.api import TrainOptions, refuse_built, spell_class_weights, weights_of, without_loaders
from tutti.run.build import seeded
from tutti.run.config import Options, TrainConfig
from tutti.run.pickled import Pickled
from tutti.run.pickled_arguments import by_name
from tutti.studies.blocks import Blocks


@dataclass(frozen=True)
class Arguments:
    """The arguments of a study in Python.

    Attributes:
        config: what all runs have in common, with data that have a name.
        contents: data that were given as an object, or by a function: read once, and kept in the farm; None:
            a name or a path was given.
        objects: what was given as Python objects, as in a `Job`.
        blocks: the ranks.
        out: the folder of the farm; None: the usual one.
    """

    config: TrainConfig
    contents: Contents[Stored[Rows], Array] | None
    objects: dict[str, Pickled]
    blocks: Blocks
    out: str | None

    @classmethod
    def of(
        cls,
        function: str,
        data: object,
        given: Mapping[str, object],
        options: TrainOptions,
        *,
        workers: int,
        blocks: int | None,
        job_timeout: str | None,
        resume: bool,
        quiet: bool,
    ) -> Arguments:
        """Check the arguments, and read data that are given as an object.

        Args:
            function: the name of the study in Python.
            data: as `tutti.train` takes it.
            given: the arguments that may be Python objects, by the fields of a configuration.
            options: the others.
            workers: the ranks of each run.
            blocks: runs at a time.
            job_timeout: of each run.
            resume: whether the farm is to go on.
            quiet: print nothing.

        Raises:
            UserError: an argument is wrong.
        """
        for name in options:
            if name not in TrainOptions.__annotations__:
                hint = f"See help(tutti.{function})."
                raise UnknownName("argument", name, [*TrainOptions.__annotations__], hint)
        out, limit = options.pop("out", None), options.pop("time_limit", None)
        threads = options.pop("threads", None)
        place_blocks(workers, blocks, threads, None)
        if resume and out is None:
            raise BadOption("resume=True needs out: the folder of the farm to go on with")
        refuse_built(given["optimizer"])
        data = without_loaders(data, options, quiet)
        spell_class_weights(options)
        known = {"strategy": given["strategy"] or "auto", "optimizer": given["optimizer"] or "adam"}
        values, objects = by_name({**given, **known, "sampling": weights_of(given["sampling"])})
        config, contents = _opened(data, TrainConfig.from_json({**values, **options}))
        ranks = Blocks.of(workers, blocks, threads, job_timeout, limit)
        return cls(config, contents, objects, ranks, out)

    @property
    def arrays(self) -> dict[str, Array] | None:
        """The data as the arrays of an NPZ file; None: their name is enough."""
        if self.contents is None:
            return None
        found = to_keys(replace(self.contents, classes=None, columns=()))
        return {key: rows[:] for key, rows in found.items()}


def _opened(data: object, config: TrainConfig) -> tuple[TrainConfig, Contents[Stored[Rows], Array] | None]:
    """Read data, unless the ranks can do so by their name."""
    if isinstance(data, str | os.PathLike):
        return replace(config, data=os.fspath(data)), None
    with seeded(config.seed), keeping_doubles(config.precision == "fp64"):
        options = config.data_options
        if callable(data) and not isinstance(data, Dataset):
            data, options = call_with_options(data, options, "data set", "data"), {}
        contents = read_source(data, options)
    kept: Options = {"classes": contents.classes} if contents.classes is not None else {}
    if contents.filled:
        kept["missing"] = "mean"
    return replace(config, data=DATA, data_options=kept), contents
