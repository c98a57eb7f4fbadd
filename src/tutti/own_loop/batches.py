"""Batches as programs have them: tensors and arrays, and tuples, lists and mappings of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, Final

import numpy as np
from torch import Tensor

from tutti.errors import BadOption

Block = Tensor | np.ndarray[Any, Any]
"""Numbers that may have the samples along their first dimension."""

BLOCKS: Final = (Tensor, np.ndarray)
"""Their types."""

Values = Block | list[Any] | tuple[Any, ...]
"""A part of a batch with an item for each of its samples."""

PLAIN: Final = (int, float, str, bytes)
"""Types in the lists that a program may have besides the tensors of a batch."""


def blocks_in(batch: Any) -> Iterator[Block]:
    """Yield the tensors and arrays in a batch, which may be nested."""
    if isinstance(batch, BLOCKS):
        yield batch
    elif isinstance(batch, (tuple, list, Mapping)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from blocks_in(value)


def mapped(batch: Any, function: Callable[[Values], Values]) -> Any:
    """Apply `function` to all tensors, arrays, and lists and tuples of numbers or text in a batch."""
    if isinstance(batch, BLOCKS):
        return function(batch)
    if batch is None or isinstance(batch, PLAIN):
        return batch
    if isinstance(batch, Mapping):
        values = {key: mapped(value, function) for key, value in batch.items()}
        if isinstance(batch, dict) or not isinstance(batch, MutableMapping):
            return values
        moved = copy.copy(batch)  # such as a batch of Hugging Face's collators
        moved.update(values)
        return moved
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, function) for value in batch))
    if isinstance(batch, (tuple, list)):
        if batch and all(isinstance(value, PLAIN) for value in batch):
            return function(batch)
        return type(batch)(mapped(value, function) for value in batch)
    raise BadOption(
        f"shard() can cut tensors, arrays, and tuples, lists and dicts of them, not {type(batch).__name__}"
    )
