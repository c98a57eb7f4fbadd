"""Training from data that memory does not hold: inputs stay in NPY files, which are read window by window.

    files             block 0 │ block 1 │ block 2 │ block 3 │ block 4 │ block 5    neighbours on the disk
    blocks, permuted     4    │    1    │    5    │    0    │    3    │    2       of (seed, epoch)
    windows            the samples of 4, 1, 5     │  the samples of 0, 3, 2        each permuted as a whole

A block is read in one piece, so the disk is as fast as it can be; a batch draws from all blocks of a window.
The next window is read while one is in use. Any number of ranks walks through the same order.

Sources: Xu et al., "In-Database Machine Learning with CorgiPile: Stochastic Gradient Descent without Full
Data Shuffle", SIGMOD 2022, section 4: blocks are permuted, and the samples of several of them in a buffer,
too; this converges like a full shuffle, with an error that falls with the number of blocks in the buffer.
MosaicML Streaming's shuffle "py1br" (docs.mosaicml.com/projects/streaming, "Shuffling") does so with shards.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, cast

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tutti.data.builtin import BUILT_IN
from tutti.data.columns import Inputs, Stored
from tutti.data.formats.npy import Mapped
from tutti.data.parts import Part, Scale, epoch_generator
from tutti.data.remote import is_remote
from tutti.data.rows import Indices
from tutti.data.splits import divide
from tutti.errors import BadData, BadOption
from tutti.load_object import names_object

STREAM: Final = "stream"
BUFFER: Final = "buffer"

BUFFER_MB: Final = 256
"""The memory for inputs that are streamed: half for the window in use, half for the next."""

MOST: Final = 0.5
"""The share of the free memory that data may take before they are streamed: the model needs some, too."""

BLOCK_BYTES: Final = 1 << 20
"""The size of a block, and of a stretch that is kept aside: pieces of this size keep any disk busy."""

FEWEST_BLOCKS: Final = 32
"""The least blocks of a window: with fewer, batches of sorted data would be of few classes."""

FEWEST_STRETCHES: Final = 1000
"""The least stretches that samples are divided into before some are kept aside."""

SEEN_BYTES: Final = 1 << 26
"""The bytes that decide mean and deviation of pixels: all, or evenly spaced pieces of larger data."""

SEEN_PIECES: Final = 64


def stream_options(options: Mapping[str, object]) -> tuple[bool | None, int, dict[str, object]]:
    """Return whether to stream data (None: "auto"), the bytes for their inputs, and the other options."""
    others = dict(options)
    wanted, buffer = others.pop(STREAM, "auto"), others.pop(BUFFER, BUFFER_MB)
    if wanted != "auto" and not isinstance(wanted, bool):
        raise BadOption(f"--data.stream is {wanted!r}; give true, false or auto")
    if isinstance(buffer, bool) or not isinstance(buffer, int | float) or not buffer > 0:
        raise BadOption(f"--data.buffer is {buffer!r}; give the memory for streamed inputs in MB, above 0")
    return (None if wanted == "auto" else bool(wanted)), int(buffer * 1e6), others


def decided(data: object, streamed: bool) -> dict[str, object]:
    """Return the options that repeat a decision about streaming: another host may have other memory."""
    if streamed:
        return {STREAM: True}
    if not isinstance(data, str | Path) or data in BUILT_IN or names_object(str(data)):
        return {}
    return {STREAM: False} if is_remote(data) or any(Path(data).expanduser().glob("*.npy")) else {}


@dataclass(frozen=True)
class Windows:
    """The division of samples into blocks, and of their order into windows."""

    samples: int  # their number
    block: int  # the samples of a block; the last one may have fewer
    window: int  # the samples of a window; the last one of an epoch may have fewer

    @classmethod
    def of(cls, samples: int, sample_bytes: int, buffer_bytes: int) -> Windows:
        """Divide samples so that two windows fit into a buffer."""
        window = min(samples, max(1, buffer_bytes // 2 // sample_bytes))
        return cls(samples, max(1, min(BLOCK_BYTES // sample_bytes, window // FEWEST_BLOCKS)), window)

    def order(self, seed: int, epoch: int) -> Tensor:
        """Return the order of an epoch: positions of samples, int64."""
        generator = epoch_generator(seed, epoch)
        blocks = torch.randperm(-(-self.samples // self.block), generator=generator)
        order = (blocks[:, None] * self.block + torch.arange(self.block)).flatten()
        order = order[order < self.samples]
        for window in torch.split(order, self.window):
            window.copy_(window[torch.randperm(len(window), generator=generator)])
        return order


class Source:
    """The inputs of a part in its files.

    Args:
        files: with the samples.
        dtype: of stored inputs.
        picked: the numbers of these samples in the files, of shape (samples,), int64; None: all.

    Attributes:
        read_s: the seconds spent taking samples from the files.
    """

    def __init__(self, files: Mapped, dtype: torch.dtype, picked: Tensor | None = None) -> None:
        self.files, self.dtype, self.picked = files, dtype, picked
        self.read_s = 0.0
        self._expected: tuple[int, int] | None = None

    @override
    def __reduce__(self) -> tuple[object, ...]:
        return Source, (self.files, self.dtype, self.picked)

    def gather(self, numbers: Tensor) -> Tensor:
        """Return the stored inputs of some samples."""
        began = time.perf_counter()
        some = numbers if self.picked is None else self.picked[numbers]
        rows = np.ascontiguousarray(self.files[some.numpy()])
        stored = torch.from_numpy(rows).to(self.dtype)
        self.read_s += time.perf_counter() - began
        return stored

    def expect(self, windows: Windows, rows: Tensor | None, order: Tensor, start: int) -> None:
        """Start to read the window at `start` of an order, and the next one."""
        key = order.data_ptr(), start // windows.window
        if key == self._expected:
            return
        first = key[1] + (self._expected == (key[0], key[1] - 1))
        self._expected = key
        wanted = order[first * windows.window : (key[1] + 2) * windows.window]
        threading.Thread(target=self._read_ahead, args=(windows, rows, wanted), daemon=True).start()

    def _read_ahead(self, windows: Windows, rows: Tensor | None, wanted: Tensor) -> None:
        for block in np.unique(wanted.numpy() // windows.block):
            low, high = block * windows.block, min((block + 1) * windows.block, windows.samples) - 1
            if rows is not None:
                low, high = int(rows[low]), int(rows[high])
            with suppress(OSError):  # The rank that takes a sample of a file that is gone raises the error.
                self.files.read_ahead(int(low), int(high) + 1)


@dataclass(frozen=True)
class StreamedPart(Part):
    """A part with its inputs in files. The stored inputs are a tensor without memory."""

    buffer_bytes: int = 0  # the memory of the current window and the next one
    source: Source = field(kw_only=True, repr=False, compare=False)  # reads the inputs

    @property
    def sample_bytes(self) -> int:
        """The bytes of one input as stored."""
        return max(1, cast("Tensor", self.stored_inputs)[:1].nbytes)

    @property
    def windows(self) -> Windows:
        """The division of the samples."""
        return Windows.of(len(self), self.sample_bytes, self.buffer_bytes)

    @override
    def order(self, seed: int, epoch: int) -> Tensor:
        return self.windows.order(seed, epoch)

    @override
    def expect(self, order: Tensor, start: int) -> None:
        self.source.expect(self.windows, self.rows, order, start)

    @override
    def waited_s(self) -> Mapping[str, float]:
        seconds, self.source.read_s = self.source.read_s, 0.0
        return {"extract": seconds}

    @override
    def with_rows(self, rows: Tensor | None, scale: Scale) -> Part:
        source = Source(self.source.files, self.source.dtype, self.source.picked)
        return replace(self, rows=rows, scale=scale, source=source)

    @override
    def stretch(self, positions: slice) -> Part:
        stored = torch.arange(len(self.stored_targets)) if self.rows is None else self.rows
        some, picked = stored[positions].clone(), self.source.picked
        source = Source(self.source.files, self.source.dtype, some if picked is None else picked[some])
        return replace(self._counted(lambda one: one[some]), rows=None, source=source)

    @override
    def changed(self, change: Callable[[Tensor], Tensor]) -> Part:
        return self._counted(change)

    @override
    def on(self, device: str, copied: Callable[[Tensor], Tensor] | None = None) -> Part:
        return self

    @override
    def tensors(self) -> Iterator[Tensor]:
        yield from (one for one in (self.stored_targets, self.stored_weights) if one is not None)

    @property
    @override
    def inputs(self) -> Stored[Tensor]:
        raise BadData(
            "these samples are streamed from files, and this needs all of them in memory; give "
            "--data.stream false"
        )

    @override
    def _seen(self, indices: Tensor) -> Inputs:
        return self.scale.apply(self.source.gather(indices))

    def thinned(self, rows: Indices) -> Indices:
        """Return evenly spaced pieces of many samples, from which the scale is computed."""
        each = max(1, SEEN_BYTES // self.sample_bytes // SEEN_PIECES)
        return np.concatenate([piece[:each] for piece in np.array_split(rows, SEEN_PIECES)])

    def divide(self, test: float, validation: float, seed: int) -> tuple[Indices, Indices, Indices]:
        """Choose samples to train on, a validation part and a test part, in stretches of neighbours.

        A tenth of single samples would be as slow to read as nearly all of them.
        """
        samples = len(self)
        length = max(1, min(BLOCK_BYTES // self.sample_bytes, samples // FEWEST_STRETCHES))
        stretches = np.zeros(-(-samples // length), dtype=np.int8)
        _, aside, tested = divide(stretches, test, validation, seed, None)
        stretches[aside], stretches[tested] = 1, 2
        part_of = np.repeat(stretches, length)[:samples]
        return np.flatnonzero(part_of == 0), np.flatnonzero(part_of == 1), np.flatnonzero(part_of == 2)
