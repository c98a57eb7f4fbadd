"""The choices of a training run: ranks, threads, precision, layout, batch size. Needs no torch."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Final

from tutti.batch_last import BATCH_LAST, REAL_TYPES
from tutti.batch_last.compiler import kernels
from tutti.errors import BadOption
from tutti.run.config import TrainConfig

LAYOUTS: Final = ("contiguous", "channels_last", BATCH_LAST)
"""Layouts that give the same results up to rounding."""

NARROW: Final = 64
"""The largest number of maps with which batch_last is likely to be the fastest layout."""

SAMPLES_OF_A_RANK: Final = 8
"""With fewer samples of a batch a rank is unlikely to pay off."""

PRECISIONS: Final = ("fp64", "fp32", "fp16", "bf16")
"""By their rounding, the least first."""


@dataclass(frozen=True)
class Candidate:
    """One way to run a training."""

    ranks: int
    threads: int  # of each rank
    precision: str  # of forward and backward
    layout: str  # the memory format of 4-d tensors
    batch_size: int  # samples of one update, over all ranks

    @property
    def shape(self) -> str:
        """Ranks and threads in words, such as "2 ranks x 1 thread"."""
        ranks = f"{self.ranks} rank{'s' if self.ranks > 1 else ''}"
        return f"{ranks} x {self.threads} thread{'s' if self.threads > 1 else ''}"

    def __str__(self) -> str:
        return f"{self.shape}, {self.precision}, {self.layout}"

    @property
    def complexity(self) -> tuple[int, int, int, int, int]:
        """The sort key that puts the simpler of two equally fast candidates first."""
        layout, precision = LAYOUTS.index(self.layout), PRECISIONS.index(self.precision)
        return self.ranks, self.threads, layout, precision, self.batch_size

    def applied_to(self, config: TrainConfig) -> TrainConfig:
        """Return the configuration with this choice applied."""
        chosen = asdict(self)
        return replace(config, workers=str(chosen.pop("ranks")), **chosen)


@dataclass(frozen=True)
class Choices:
    """The choices: every shape with every precision, layout and batch size."""

    shapes: tuple[tuple[int, int], ...]  # numbers of ranks, and of threads of each rank
    precisions: tuple[str, ...]  # of `PRECISIONS`
    layouts: tuple[str, ...]  # of `LAYOUTS`, the most likely first
    batch_sizes: tuple[int, ...]

    def candidates(self) -> list[Candidate]:
        """Return all combinations, first the likely ones: on all cores, with enough samples for a rank."""
        shapes = sorted(self.shapes, key=self._unlikelihood)
        axes = (self.precisions, shapes, self.layouts, self.batch_sizes)
        # A candidate with one second choice comes before one with two.
        places = sorted(itertools.product(*(range(len(axis)) for axis in axes)), key=sum)
        crossed = [
            Candidate(*shapes[shape], self.precisions[kind], self.layouts[layout], self.batch_sizes[size])
            for kind, shape, layout, size in places
        ]
        return [one for one in crossed if one.ranks <= one.batch_size and self._fits_batch_last(one)]

    def for_maps(self, most: int) -> Choices:
        """Return the choices for a model whose widest convolution has `most` maps; 0 if it has none."""
        likely = (BATCH_LAST, "channels_last", "contiguous")
        if most > NARROW:
            likely = ("channels_last", "contiguous", BATCH_LAST)
        layouts = sorted(self.layouts, key=likely.index) if most else self.layouts[:1]
        return replace(self, layouts=tuple(layouts))

    def _unlikelihood(self, shape: tuple[int, int]) -> tuple[bool, int, int]:
        ranks, threads = shape
        return max(self.batch_sizes) < SAMPLES_OF_A_RANK * ranks, -ranks * threads, -ranks

    def _fits_batch_last(self, one: Candidate) -> bool:
        """Return whether the layout can be the best one: the kernels of batch_last use one thread."""
        if one.layout != BATCH_LAST:
            return True
        return one.precision in REAL_TYPES and (one.threads == 1 or self.layouts == (BATCH_LAST,))


def choices_for(
    config: TrainConfig,
    fixed: Collection[str],
    cores: int,
    precisions: Sequence[str] = (),
    batch_sizes: Sequence[int] = (),
) -> Choices:
    """Return the choices for a run whose user has set the `fixed` fields of `config`.

    Precisions and batch sizes to choose from are by default the configured ones alone.

    Raises:
        BadOption: the strategy is not supported, or nothing is left to choose from.
    """
    if config.strategy not in ("auto", "solo", "sync"):
        raise BadOption(
            f"a plan is for strategies that make the same updates with any number of ranks: sync, and solo "
            f"for one rank; for '{config.strategy}' use 'tutti compare', which trains to a goal"
        )
    sizes = tuple(dict.fromkeys(batch_sizes)) or (config.batch_size,)
    kinds = tuple(dict.fromkeys(precisions)) or (config.precision,)
    for size, precision in itertools.product(sizes, kinds):
        replace(config, batch_size=size, precision=precision)  # raises if unusable
    layouts = (config.layout,) if "layout" in fixed else _layouts(config.device, kinds)
    choices = Choices(tuple(_shapes(config, fixed, cores)), kinds, layouts, sizes)
    if not choices.candidates():
        least = min(ranks for ranks, _ in choices.shapes)
        raise BadOption(
            f"a batch of {max(sizes)} samples cannot be split over {least} ranks; use '--batch-size {least}' "
            "or more, or fewer workers"
        )
    return choices


def _layouts(device: str, precisions: Sequence[str]) -> tuple[str, ...]:
    """Return the layouts available here: batch_last needs a C compiler."""
    kinds = [REAL_TYPES[precision] for precision in precisions if precision in REAL_TYPES]
    try:
        for kind in kinds:
            kernels(kind)
    except BadOption:
        kinds = []
    return LAYOUTS if kinds and device == "cpu" else tuple(one for one in LAYOUTS if one != BATCH_LAST)


def _shapes(config: TrainConfig, fixed: Collection[str], cores: int) -> Iterator[tuple[int, int]]:
    """Yield numbers of ranks and threads that fill the cores, and one rank with one thread."""
    counts = _rank_counts(config, fixed, cores)
    if "threads" in fixed and config.threads is not None:
        fitting = [ranks for ranks in counts if ranks * config.threads <= cores]
        yield from ((ranks, config.threads) for ranks in fitting or counts[:1])
        return
    if counts[0] == 1 and cores > 1:
        yield 1, 1
    yield from ((ranks, max(1, cores // ranks)) for ranks in counts)


def _rank_counts(config: TrainConfig, fixed: Collection[str], cores: int) -> list[int]:
    """Return the powers of two up to the number of cores, and that number."""
    if "workers" in fixed and config.workers != "auto":
        return [int(config.workers)]
    if config.strategy == "solo" or config.device != "cpu":
        return [1]
    return [2**k for k in range(cores.bit_length()) if 2**k < cores] + [cores]
