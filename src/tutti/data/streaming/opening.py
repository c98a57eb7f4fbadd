"""Opening a data set whose inputs stay in files; the leader of each host reads headers and targets."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Final, cast

import numpy as np
import torch

from tutti.comm.base import Communicator
from tutti.data.agreement import agreed
from tutti.data.arrays import image_layout, input_column, stored_dtype
from tutti.data.columns import Stored
from tutti.data.contents import Contents, from_keys, slot_of
from tutti.data.formats.npy import files_by_key, joined_files
from tutti.data.parts import DataSet, Part, Scale
from tutti.data.rows import Array, Rows, StoredRows
from tutti.data.scale import pixel_sums, scale_of
from tutti.data.streaming.mapped import Mapped
from tutti.data.streaming.options import Streamable
from tutti.data.streaming.part import Source, StreamedPart
from tutti.data.streaming.spans import Spans, split_stretches, stretch_length
from tutti.data.streaming.windows import Windows
from tutti.data.targets import KnownClasses, with_checked_targets
from tutti.errors import BadData, BadOption
from tutti.records.untrusted import printable

BLOCK_BYTES: Final = 1 << 20
"""The size of a block: so much in one piece keeps any disk busy, and many of them fit into a window."""

SEEN_BYTES: Final = 1 << 26
"""Mean and deviation of pixels are those of as many bytes, in evenly spaced pieces of larger data."""

SEEN_PIECES: Final = 64

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
    """

    dataset: DataSet
    checksum: int
    files: Mapping[str, Mapped]
    uses: tuple[tuple[str, Spans], ...]


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
        BadData, BadOption: the data cannot be used. Every rank raises the same error.
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
    (name, spans), *_ = found.uses
    scale = Scale()
    if found.files[name].dtype == np.uint8:
        scale = cast(
            "Scale", node.broadcast_object(_scale(found.files[name], spans) if node.rank == 0 else None)
        )
    ends = list(accumulate(map(len, dataset.parts)))
    uses = iter(zip(found.uses, ends, strict=True))

    def with_source(part: Part) -> Part:
        (name, spans), end = next(uses)
        leads = node.rank == 0
        source = Source(found.files[name], spans, part.stored_inputs.dtype, leads)  # type: ignore[union-attr]
        return replace(
            cast("StreamedPart", part),
            stored_targets=targets[end - len(part) : end],
            scale=scale,
            source=source,
        )

    opened = dataset.with_parts(with_source)
    node.barrier()  # Nobody goes on before the leader has filled the targets.
    return opened


def _find(
    given: Streamable, validation: float, seed: int, known: KnownClasses | None
) -> tuple[Found, list[tuple[Array, Spans]]]:
    """Return what is in a folder, and for each part of the data set the targets that it is some of."""
    contents = _read(given.folder, given.options)
    files = {part: cast("Mapped", x) for part, (x, _) in contents.parts.items()}
    classes = given.options.get("classes")
    if classes is not None and (not isinstance(classes, int) or isinstance(classes, bool) or classes < 1):
        raise BadOption(f"--data.classes is {classes!r}; give a whole number of at least 1")
    checked = with_checked_targets(
        cast("Contents[Stored[Rows], Array]", replace(contents, name=printable(contents.name))),
        classes,
        known,
    )
    train = files["train"]
    rows = image_layout(train, turn=True)
    length = stretch_length(len(rows), _sample_bytes(rows))
    share = 0.0 if "validation" in files else validation
    kept, aside = split_stretches(len(rows), length, share, seed)
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
    return Found(dataset, checksum, files, tuple(uses[part] for part in order)), wanted


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
        key: Mapped(files) if key in inputs else _in_memory(joined_files(files))
        for key, files in found.items()
    }
    contents = from_keys(values, folder.resolve().name, str(folder))
    for part, (x, y) in contents.parts.items():
        input_column(part, f"{part} inputs", cast("Mapped", x), cast("Array", y))
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
        buffer_bytes: of the window in use and the next one.
    """
    window = min(samples, max(1, buffer_bytes // 2 // max(1, sample_bytes)))
    block = max(1, min(BLOCK_BYTES // max(1, sample_bytes), window // FEWEST_BLOCKS))
    return Windows(samples, block, -(-samples // block) if window == samples else window // block)


def _scale(files: Mapped, spans: Spans) -> Scale:
    """Return the scale of pixels, by all samples of a part or evenly spaced pieces of it."""
    samples = len(spans)
    most = max(SEEN_PIECES, SEEN_BYTES // max(1, _sample_bytes(files)))
    length = -(-samples // SEEN_PIECES) if samples <= most else most // SEEN_PIECES
    total, seen, values = np.zeros((1, 2), np.int64), 0, 0
    for start in np.linspace(0, samples, SEEN_PIECES, endpoint=False).astype(np.int64):
        stop = min(int(start) + length, samples)
        positions = np.arange(max(int(start), seen), stop)
        if not len(positions):
            continue
        chunk = image_layout(files.take(spans.rows(positions)), turn=True)
        sums = pixel_sums(np.ascontiguousarray(chunk))
        total, seen, values = total + sums.sum(0), stop, values + chunk.size // sums.shape[1]
    return scale_of(total, values)
