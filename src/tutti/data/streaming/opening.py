"""Opening a data set whose inputs stay in files: targets and two windows of inputs are in memory.

leader of each host     reads headers and targets, splits, checks
all ranks of the host   read all inputs once for means and deviations, unless that is kept beside the files
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Final, cast

import numpy as np
import torch
from torch import Tensor

from tutti.comm.base import Communicator, cut
from tutti.data.agreement import agreed
from tutti.data.arrays import stored_dtype
from tutti.data.columns import Stored
from tutti.data.contents import Contents, from_keys, slot_of
from tutti.data.formats.npy import files_by_key, joined_files
from tutti.data.parts import DataSet, Part, Scale
from tutti.data.rows import Array, Rows, StoredRows
from tutti.data.scale import scale_of
from tutti.data.streaming.layout import kept_rows, refuse_unusable
from tutti.data.streaming.options import Streamable
from tutti.data.streaming.part import Source, StreamedPart
from tutti.data.streaming.ring import SLOTS, Ring, ring_shape
from tutti.data.streaming.shards import Shard, ShardRows
from tutti.data.streaming.spans import Spans, split_stretches, stretch_length
from tutti.data.streaming.statistics import (
    Statistics,
    about_files,
    keep_statistics,
    load_statistics,
    needs_pass,
)
from tutti.data.streaming.windows import Windows
from tutti.data.targets import KnownClasses, with_checked_targets
from tutti.errors import BadData, BadOption
from tutti.records.untrusted import printable

BLOCK_BYTES: Final = 1 << 20
"""The size of a block: so much in one piece keeps any disk busy, and many of them fit into a window."""

FEWEST_BLOCKS: Final = 32
"""Blocks of a window at least: with fewer, batches of sorted data would be of few classes."""


@dataclass(frozen=True)
class Found:
    """A data set in files, as the leader of a host has found it.

    Attributes:
        dataset: its parts have neither memory nor sources.
        checksum: of the targets.
        files: of the inputs of each part in the folder.
        uses: for each part of the data set, in order, the part in the folder and which of its samples.
        trained: of the stretches of the folder's training part, which are trained on.
    """

    dataset: DataSet
    checksum: int
    files: Mapping[str, ShardRows]
    uses: tuple[tuple[str, Spans], ...]
    trained: Array


def open_streamed(
    given: Streamable | None,
    comm: Communicator,
    validation: float,
    seed: int,
    known: KnownClasses | None = None,
) -> DataSet:
    """Open a data set that is streamed (collective); see `tutti.data.opening.open_data`.

    Args:
        given: the folder and its options; only those of the first rank of each host count.
        comm: all ranks.
        validation: share of the training samples that is kept aside; of whole stretches of neighbours.
        seed: decides which.
        known: the classes of a model that the data are for.

    Raises:
        BadData, NotFinite, BadOption: the data cannot be used. Every rank raises the same error.
    """
    node = comm.node
    wanted: list[tuple[Array, Spans]] = []

    def look() -> Found:
        if given is None:
            raise BadData(
                "another host has data that are streamed, and this one has not; copy the same files"
            )
        found, targets = _find(given, validation, seed, known)
        wanted.extend(targets)
        return found

    found = agreed(comm, look, about=lambda one: repr((one.dataset, one.checksum)))
    dataset = found.dataset
    first = dataset.train.stored_targets
    targets = node.shared(sum(map(len, dataset.parts)), *first.shape[1:], dtype=first.dtype)
    if node.rank == 0:
        _fill(targets.numpy(), wanted)
        wanted.clear()
    folder = cast("Path", node.broadcast_object(None if given is None else given.folder))
    rows = {part: kept_rows(shards) for part, shards in found.files.items()}
    scale = _checked_scale(found, rows, folder, comm)
    ends = list(accumulate(map(len, dataset.parts)))
    uses = iter(zip(found.uses, ends, strict=True))

    def with_source(part: Part) -> Part:
        (name, spans), end = next(uses)
        source = Source(found.files[name], spans, part.stored_inputs.dtype)  # type: ignore[union-attr]
        return replace(
            cast("StreamedPart", part),
            stored_targets=targets[end - len(part) : end],
            scale=scale,
            source=source,
        )

    opened = dataset.with_parts(with_source)
    train = cast("StreamedPart", opened.train)
    assert train.windows is not None, "the training part is streamed in windows"
    assert train.source is not None, "it has just been given one"
    memory = node.shared(
        *ring_shape(train.windows, cast("Tensor", train.stored_inputs)), dtype=train.source.dtype
    )
    control = node.shared(Ring.control_size(node.size), dtype=torch.int64)
    train.source.ring = Ring(train.windows, memory, control, node.rank, node.size, train.source.read)
    node.barrier()  # Nobody goes on before the leader has filled the targets.
    return opened


def _find(
    given: Streamable, validation: float, seed: int, known: KnownClasses | None
) -> tuple[Found, list[tuple[Array, Spans]]]:
    """Return what is in a folder, and for each part of the data set the targets that it is some of."""
    contents = _read(given.folder, given.options)
    files = {part: cast("ShardRows", x) for part, (x, _) in contents.parts.items()}
    classes = given.options.get("classes")
    if classes is not None and (not isinstance(classes, int) or isinstance(classes, bool) or classes < 1):
        raise BadOption(f"--data.classes is {classes!r}; give a whole number of at least 1")
    checked = with_checked_targets(
        cast("Contents[Stored[Rows], Array]", replace(contents, name=printable(contents.name))),
        classes,
        known,
    )
    train = files["train"]
    rows = kept_rows(train)
    length = stretch_length(len(rows), _sample_bytes(rows))
    share = 0.0 if "validation" in files else validation
    trained, kept, aside = split_stretches(len(rows), length, share, seed)
    uses = {"train": ("train", kept), "validation": ("train", aside)}
    uses |= {part: (part, Spans.whole(len(found))) for part, found in files.items() if part != "train"}
    windows = windows_of(len(kept), _sample_bytes(rows), given.buffer_bytes)
    parts: dict[str, StreamedPart] = {}
    checksum = 0
    for part, (name, spans) in uses.items():
        if not len(spans):
            continue
        y = checked.parts[name][1]
        for low, high in spans.stretches(0, len(spans)):
            checksum = zlib.crc32(np.ascontiguousarray(y[low:high]).data, checksum)
        parts[part] = _outline(rows, y, len(spans), windows if part == "train" else None)
    dataset = DataSet(
        checked.name,
        parts["train"],
        parts.get("validation"),
        parts.get("test"),
        checked.classes,
        tuple(map(printable, checked.labels)),
        columns=tuple(map(printable, checked.columns)),
    )
    order = [part for part in ("train", "validation", "test") if part in parts]
    wanted = [(checked.parts[name][1], spans) for name, spans in (uses[part] for part in order)]
    return Found(dataset, checksum, files, tuple(uses[part] for part in order), trained), wanted


def _fill(targets: Array, wanted: list[tuple[Array, Spans]]) -> None:
    """Write the targets of each part, one after the other; no second copy of them ever exists."""
    start = 0
    for y, spans in wanted:
        for low, high in spans.stretches(0, len(spans)):
            targets[start : start + high - low] = y[low:high]
            start += high - low


def _read(folder: Path, options: Mapping[str, object]) -> Contents[object]:
    """Return what is in a folder of NPY files; of the inputs only the headers are read."""
    for name in options:
        if name not in ("classes", "missing"):
            raise BadOption(f"--data.{name} is no option of data that are streamed; leave it out")
    missing = options.get("missing", "error")
    if missing != "error":
        raise BadOption(
            f"--data.missing {missing} is not for data that are streamed; write them anew by: tutti data "
            f"convert {folder} NEW --data.missing drop"
        )
    found = files_by_key(folder)
    inputs = {key for key in found if (slot_of(key) or ("", ""))[1] == "inputs"}
    values: dict[str, object] = {
        key: ShardRows.of(files) if key in inputs else _in_memory(joined_files(files))
        for key, files in found.items()
    }
    contents = from_keys(values, folder.resolve().name, str(folder))
    paths = {(slot_of(key) or ("", ""))[0]: files for key, files in found.items() if key not in inputs}
    for part, (x, y) in contents.parts.items():
        refuse_unusable(part, cast("ShardRows", x), cast("Array", y), paths[part])
    return contents


def _in_memory(rows: Rows) -> Array:
    return rows[:] if isinstance(rows, StoredRows) else np.array(rows)


def _sample_bytes(rows: Rows) -> int:
    return rows.size // len(rows) * stored_dtype(rows).itemsize


def _outline(rows: Rows, targets: Array, samples: int, windows: Windows | None) -> StreamedPart:
    x = torch.from_numpy(np.empty((0, *rows.shape[1:]), stored_dtype(rows)))
    y = torch.from_numpy(targets[:0])
    return StreamedPart(
        x.new_empty(samples, *x.shape[1:], device="meta"),
        y.new_empty(samples, *y.shape[1:], device="meta"),
        windows=windows,
    )


def windows_of(samples: int, sample_bytes: int, buffer_bytes: int) -> Windows:
    """Divide samples into blocks and windows.

    Args:
        samples: how many there are.
        sample_bytes: of the inputs of one, in memory.
        buffer_bytes: the memory for all windows that are in it at once.
    """
    window = min(samples, max(1, buffer_bytes // SLOTS // max(1, sample_bytes)))
    block = max(1, min(BLOCK_BYTES // max(1, sample_bytes), window // FEWEST_BLOCKS))
    return Windows(samples, block, -(-samples // block) if window == samples else window // block)


def _checked_scale(found: Found, rows: Mapping[str, Rows], folder: Path, comm: Communicator) -> Scale:
    """Look at all inputs once, or at what was found then; returns the scale of those to be trained on."""
    scale = Scale()
    for part, one in rows.items():
        if not needs_pass(one) or (part != "train" and one.dtype == np.uint8):
            continue
        length = stretch_length(len(one), _sample_bytes(one))
        statistics = _statistics(folder, part, found.files[part].shards, one, length, comm)
        statistics.refuse_broken(part, one)
        if part == "train" and one.dtype == np.uint8:
            total = statistics.sums[found.trained].sum(0)
            trained = len(found.uses[0][1])
            scale = scale_of(total, trained * (one.size // len(one)) // len(total))
    return scale


def _statistics(
    folder: Path, part: str, shards: list[Shard], rows: Rows, length: int, comm: Communicator
) -> Statistics:
    """Return the sums over all stretches (collective), of which each rank of a host reads some."""
    node = comm.node
    known, about = None, ""
    if node.rank == 0:
        about = about_files(shards, rows, length)
        known = load_statistics(folder, part, rows, length, about)
    known = cast("Statistics | None", node.broadcast_object(known))
    if known is not None:
        return known
    if comm.rank == 0:
        print(
            f"reading {sum(shard.size for shard in shards) / 1e9:.1f} GB of {part} inputs once, for their "
            "means and NaN; what is found is kept beside them",
            file=sys.stderr,
            flush=True,
        )
    empty = Statistics.empty(rows, length)
    sums = node.shared(*empty.sums.shape, dtype=torch.float64)
    broken = node.shared(*empty.broken.shape, dtype=torch.int64)
    found = Statistics(length, sums.numpy(), broken.numpy())
    found.add(rows, cut(len(empty.sums), node.size)[node.rank])
    node.barrier()
    if node.rank == 0:
        keep_statistics(folder, part, found, about)
    return found
