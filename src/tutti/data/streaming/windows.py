"""The order of the samples in an epoch where memory does not hold them: by blocks, shuffled in windows.

    files             block 0 │ block 1 │ block 2 │ block 3 │ block 4 │ block 5    neighbours on the disk
    blocks, permuted     4    │    1    │    5    │    0    │    3    │    2       of (seed, epoch)
    windows            the samples of 4, 1, 5     │  the samples of 0, 3, 2        each permuted as a whole

A block is read in one piece, so the disk is as fast as it can be; a batch draws from all blocks of a window.
Any number of ranks walks through the same order.

Sources: Xu et al., "In-Database Machine Learning with CorgiPile: Stochastic Gradient Descent without Full
Data Shuffle", SIGMOD 2022, section 4: blocks are permuted, and the samples of several of them in a buffer,
too; this converges like a full shuffle, with an error that falls with the number of blocks in the buffer.
MosaicML Streaming's shuffle "py1br" (docs.mosaicml.com/projects/streaming, "Shuffling") does so with shards.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_KEPT: Final = 2
"""Windows whose permutation is kept: a batch may lie in two."""


@dataclass(frozen=True)
class Windows:
    """The division of samples into blocks and of these into windows.

    Attributes:
        samples: how many there are.
        block: the samples of a block; the last one may have fewer.
        blocks: the blocks of a window; the last one of an epoch may have fewer.
    """

    samples: int
    block: int
    blocks: int

    @property
    def all_blocks(self) -> int:
        """The number of blocks."""
        return -(-self.samples // self.block)

    @property
    def count(self) -> int:
        """The number of windows in an epoch."""
        return -(-self.all_blocks // self.blocks)

    @property
    def largest(self) -> int:
        """The most samples that a window may have."""
        return min(self.samples, self.block * self.blocks)

    def span(self, block: int) -> range:
        """Return the positions of the samples of a block."""
        return range(block * self.block, min((block + 1) * self.block, self.samples))

    def order(self, seed: int, epoch: int) -> WindowOrder:
        """Return the order of an epoch."""
        return WindowOrder(self, seed, epoch)


@dataclass(eq=False)
class WindowOrder:
    """The order of an epoch, of which no more than some windows are in memory.

    It is indexed as the tensor of positions that it stands for, by a slice or a mask of all.

    Attributes:
        windows: how blocks and windows lie.
        seed: of the run.
        epoch: its number, from 0.
    """

    windows: Windows
    seed: int
    epoch: int
    _blocks: NDArray[np.int64] = field(init=False, repr=False)
    _starts: NDArray[np.int64] = field(init=False, repr=False)
    _window_of: NDArray[np.int64] = field(init=False, repr=False)
    _last: tuple[int, int, Tensor] = field(init=False, repr=False)
    _first_key: int = field(init=False, repr=False)
    _known: dict[int, Tensor] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        of = self.windows
        self._blocks = np.random.default_rng((self.seed, self.epoch)).permutation(of.all_blocks)
        sizes = np.full(of.all_blocks, of.block)
        sizes[self._blocks == of.all_blocks - 1] = len(of.span(of.all_blocks - 1))
        ends = np.concatenate([[0], sizes.cumsum()])
        self._starts = ends[np.minimum(np.arange(of.count + 1) * of.blocks, of.all_blocks)]
        self._window_of = np.empty(of.all_blocks, np.int64)
        self._window_of[self._blocks] = np.arange(of.all_blocks) // of.blocks

        seed = zlib.crc32(str(self.seed).encode()) & 0x7FFFFFFF
        self._last = 0, 0, torch.empty(0, dtype=torch.int64)
        self._first_key = seed << 32 | (self.epoch * of.count + 1)

    def __len__(self) -> int:
        return self.windows.samples

    def __getitem__(self, wanted: slice | Tensor) -> Tensor:
        """Return the positions of some samples, int64."""
        if isinstance(wanted, Tensor):
            every = torch.from_numpy(self._starts)
            masks = torch.split(wanted, every.diff().tolist())
            return torch.cat([self.window(number)[mask] for number, mask in enumerate(masks)])
        start, stop, step = wanted.indices(len(self))
        assert step == 1, "an order is walked through forwards"
        if stop <= start:
            return torch.empty(0, dtype=torch.int64)
        begin, end, of_last = self._last
        if begin <= start and stop <= end:
            return of_last[start - begin : stop - begin]
        first, last = (int(self._starts.searchsorted(at, "right")) - 1 for at in (start, stop - 1))
        found = []
        for number in range(first, last + 1):
            begin, end = self._starts[number : number + 2].tolist()
            self._last = begin, end, self.window(number)
            found.append(self._last[2][max(start - begin, 0) : min(stop, end) - begin])
        return found[0] if len(found) == 1 else torch.cat(found)

    def blocks(self, number: int) -> NDArray[np.int64]:
        """Return the blocks of a window."""
        return self._blocks[number * self.windows.blocks : (number + 1) * self.windows.blocks]

    def window(self, number: int) -> Tensor:
        """Return the positions of the samples of a window in their order, int64."""
        if number not in self._known:
            spans = [self.windows.span(int(block)) for block in self.blocks(number)]
            ordered = np.concatenate([np.arange(span.start, span.stop) for span in spans])
            mixed = np.random.SeedSequence((self.seed, self.epoch, number)).generate_state(1, np.uint64)[0]
            generator = torch.Generator().manual_seed(int(mixed))
            shuffled = torch.from_numpy(ordered)[torch.randperm(len(ordered), generator=generator)]
            while len(self._known) >= _KEPT:
                self._known.pop(next(iter(self._known)))
            self._known[number] = shuffled
        return self._known[number]

    def window_of(self, sample: int) -> int:
        """Return the window of a sample, by its position."""
        return int(self._window_of[sample // self.windows.block])

    def key(self, number: int) -> int:
        """Return a number above 0 for a window, which tells it from those of other epochs and seeds."""
        return self._first_key + number
