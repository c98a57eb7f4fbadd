"""A part of a data set whose inputs stay in files; its targets are in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tutti.data.columns import Inputs, Stored
from tutti.data.parts import Part
from tutti.data.rows import Array, Indices
from tutti.data.streaming.layout import kept_rows
from tutti.data.streaming.ring import Ring
from tutti.data.streaming.shards import ShardRows
from tutti.data.streaming.spans import Spans
from tutti.data.streaming.windows import WindowOrder, Windows
from tutti.errors import BadData


class Source:
    """The inputs of a part in its files.

    Args:
        shards: the files.
        spans: which of their samples are the part's.
        dtype: in which inputs are kept.

    Attributes:
        rows: the samples of the files in the layout in which inputs are kept.
        ring: the windows in memory; None: samples are read as they are asked for.
        read_s: the seconds in which samples were read that no window had.
    """

    def __init__(self, shards: ShardRows, spans: Spans, dtype: torch.dtype) -> None:
        self.shards, self.spans, self.dtype = shards, spans, dtype
        self.rows = kept_rows(shards)
        self.ring: Ring | None = None
        self.read_s = 0.0

    @override
    def __reduce__(self) -> tuple[type[Source], tuple[ShardRows, Spans, torch.dtype]]:
        # The memory of a host is its own.
        return Source, (self.shards, self.spans, self.dtype)

    def read(self, start: int, found: Array) -> None:
        """Write the samples from a position on into an array, as many as it has."""
        at = 0
        for low, high in self.spans.stretches(start, start + len(found)):
            if self.rows is self.shards and found.dtype == self.shards.dtype:
                self.shards.read_into(low, found[at : at + high - low])
            else:
                found[at : at + high - low] = self.rows[low:high]
            at += high - low

    def gather(self, samples: Tensor) -> Tensor:
        """Return the inputs at some positions, as they are stored."""
        positions: Indices = samples.numpy()
        if self.ring is None:
            return self._from_files(positions)
        places = self.ring.places(positions)
        lacking = places < 0
        if not lacking.any():
            return self.ring.memory.index_select(0, torch.from_numpy(places))
        found = self.ring.memory.index_select(0, torch.from_numpy(np.maximum(places, 0)))
        found[torch.from_numpy(lacking)] = self._from_files(positions[lacking])
        return found

    def _from_files(self, positions: Indices) -> Tensor:
        """Read the samples at some positions, neighbours at once."""
        began = time.perf_counter()
        found = torch.empty(len(positions), *self.rows.shape[1:], dtype=self.dtype)
        ordered = np.argsort(positions, kind="stable")
        steps = np.flatnonzero(np.diff(positions[ordered]) != 1) + 1
        for run in np.split(ordered, steps) if len(positions) else []:
            first = int(positions[run[0]])
            some = np.empty((len(run), *self.rows.shape[1:]), found.numpy().dtype)
            self.read(first, some)
            found[torch.from_numpy(run)] = torch.from_numpy(some)
            after = first + len(run)
            if len(run) > 1 and after < len(self.spans):
                # Evaluation goes on from here, so the disk can work meanwhile.
                for low, high in self.spans.stretches(after, min(after + len(run), len(self.spans))):
                    self.shards.expect(low, high)
        self.read_s += time.perf_counter() - began
        return found


@dataclass(frozen=True)
class StreamedPart(Part):
    """A part whose inputs are in files.

    The stored inputs are a tensor without memory, which has their shape and type.

    Attributes:
        windows: how an epoch's samples are ordered; None: the part is only read in its own order.
        source: reads the inputs; None in the outline of a part.
    """

    windows: Windows | None = None
    source: Source | None = field(default=None, repr=False, compare=False)

    @property
    def _source(self) -> Source:
        assert self.source is not None, "an outline has no samples"
        return self.source

    @override
    def _seen(self, indices: Tensor) -> Inputs:
        return self.scale.apply(self._source.gather(indices))

    def numbers(self, positions: Tensor) -> Tensor:
        """Return the numbers of some samples in the files, by their positions, int64."""
        return torch.from_numpy(self._source.spans.rows(positions.numpy()))

    def enter(self, order: WindowOrder, samples: Tensor) -> None:
        """Go on to some samples of an epoch, by their positions; see `Ring.enter`."""
        ring = self._source.ring
        if ring is not None and len(samples) and order.windows == self.windows:
            ring.enter(order, samples)

    def take_waited_s(self) -> float:
        """Return the seconds in which this rank has waited for files since it was last asked."""
        source, ring = self._source, self._source.ring
        seconds, source.read_s = source.read_s, 0.0
        if ring is not None:
            seconds, ring.waited_s = seconds + ring.waited_s, 0.0
        return seconds

    @property
    @override
    def inputs(self) -> Stored[Tensor]:
        raise BadData(
            "these samples are streamed from files, and this needs all of them in memory; give "
            "--data.stream false"
        )

    @override
    def stretch(self, positions: slice) -> Part:
        source = self._source
        spans = source.spans.between(positions.start, positions.stop)
        own = Source(source.shards, spans, source.dtype)
        targets = self.stored_targets[positions].clone()
        return replace(
            self,
            stored_inputs=cast("Tensor", self.stored_inputs)[positions],
            stored_targets=targets,
            windows=None,
            source=own,
        )

    @override
    def _probed(self, some: Tensor) -> Iterator[Tensor]:
        yield self._source.gather(some)

    @override
    def on(self, device: str, copied: Callable[[Tensor], Tensor] | None = None) -> Part:
        return self
