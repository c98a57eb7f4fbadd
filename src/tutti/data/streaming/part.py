"""A part of a data set whose inputs stay in files; its targets are in memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import cast

import torch
from torch import Tensor
from typing_extensions import override

from tutti.data.arrays import as_floats, image_layout, keeping_doubles
from tutti.data.columns import Inputs, Stored
from tutti.data.parts import Part
from tutti.data.streaming.mapped import Mapped
from tutti.data.streaming.spans import Spans
from tutti.data.streaming.windows import WindowOrder, Windows
from tutti.errors import BadData


class Source:
    """The inputs of a part in its files.

    Args:
        files: with the samples.
        spans: which of their samples are the part's.
        dtype: in which inputs are kept.
        reads_ahead: whether this process has the next window read.

    Attributes:
        read_s: the seconds in which samples were taken from the files.
    """

    def __init__(self, files: Mapped, spans: Spans, dtype: torch.dtype, reads_ahead: bool = False) -> None:
        self.files, self.spans, self.dtype, self.reads_ahead = files, spans, dtype, reads_ahead
        self.read_s = 0.0
        self._last: int | None = None

    @override
    def __reduce__(self) -> tuple[type[Source], tuple[Mapped, Spans, torch.dtype]]:
        return Source, (self.files, self.spans, self.dtype)

    def gather(self, samples: Tensor) -> Tensor:
        """Return the inputs at some positions, as they are stored."""
        began = time.perf_counter()
        found = image_layout(self.files.take(self.spans.rows(samples.numpy())), turn=True)
        if self.dtype.is_floating_point:
            with keeping_doubles(self.dtype == torch.float64):  # as when they were opened
                found = as_floats(found)  # type: ignore[arg-type]
        stored = torch.from_numpy(found).to(self.dtype).contiguous()
        self.read_s += time.perf_counter() - began
        return stored

    def enter(self, order: WindowOrder, samples: Tensor) -> None:
        """Have the windows of some samples and the one behind them read, unless they have been."""
        last = order.window_of(int(samples[-1]))
        key = order.key(last)
        if not self.reads_ahead or key == self._last:
            return
        first = last if self._last is None else last + 1
        self._last = key
        threading.Thread(target=self._expect, args=(order, first, last + 1), daemon=True).start()

    def _expect(self, order: WindowOrder, first: int, last: int) -> None:
        count = order.windows.count
        for number in range(first, last + 1):
            later = order.windows.order(order.seed, order.epoch + 1) if number >= count else order
            for block in later.blocks(number % count):
                span = order.windows.span(int(block))
                # Whoever takes a sample of a file that is gone says so.
                with suppress(OSError):
                    for low, high in self.spans.stretches(span.start, span.stop):
                        self.files.expect(low, high)


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
        """Go on to some samples of an epoch, by their positions; see `Source.enter`."""
        if len(samples) and order.windows == self.windows:
            self._source.enter(order, samples)

    def take_waited_s(self) -> float:
        """Return the seconds in which this rank has taken samples from files since it was last asked."""
        seconds, self._source.read_s = self._source.read_s, 0.0
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
        return replace(
            self,
            stored_inputs=cast("Tensor", self.stored_inputs)[positions],
            stored_targets=self.stored_targets[positions].clone(),
            windows=None,
            source=Source(source.files, spans, source.dtype),
        )

    @override
    def _probed(self, some: Tensor) -> Iterator[Tensor]:
        yield self._source.gather(some)

    @override
    def on(self, device: str, copied: Callable[[Tensor], Tensor] | None = None) -> Part:
        return self
