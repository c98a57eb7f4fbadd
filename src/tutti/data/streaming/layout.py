"""The inputs in files, in the layout in which they are kept, and what cannot be used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tutti.data.arrays import image_layout
from tutti.data.rows import Array, Rows
from tutti.data.streaming.shards import Shard, ShardRows
from tutti.errors import BadData


def kept_rows(shards: ShardRows) -> Rows:
    """Return samples in the layout in which they are kept: pictures have their channels first."""
    return image_layout(shards, turn=True)


def refuse_unusable(part: str, inputs: ShardRows, targets: Array, files: Sequence[Path]) -> None:
    """Refuse inputs and targets of a part that do not fit each other.

    Args:
        part: "train", "validation" or "test".
        inputs: of the part.
        targets: likewise.
        files: with the targets.

    Raises:
        BadData: with the file, where its own inputs and targets are of different number.
    """
    if len(files) == len(inputs.shards) > 1:
        for shard, path in zip(inputs.shards, files, strict=True):
            count = Shard.of(path).shape[0]
            if count != shard.shape[0]:
                raise BadData(
                    f"{shard.path} has {shard.shape[0]:,} inputs, but {path} {count:,} targets; give one "
                    "target for each input"
                )
    if targets.ndim == 0 or len(inputs) != len(targets):
        raise BadData(
            f"the {part} part has {len(inputs):,} inputs (shape {inputs.shape}) but {targets.size:,} targets "
            f"(shape {targets.shape}); give one target for each input"
        )
    if not len(inputs) or not inputs.size:
        raise BadData(
            f"the {part} inputs have the shape {inputs.shape}, so no values; give at least one sample"
        )
    if inputs.dtype.kind not in "biuf":
        raise BadData(f"the {part} inputs are of type {inputs.dtype}; give numbers, such as float32 or uint8")
