"""Batches as programs have them: tensors and arrays, and tuples, lists, mappings and dataclasses of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any, Final

import numpy as np
from torch import Tensor

from tutti.errors import BadOption

Block = Tensor | np.ndarray[Any, Any]
"""Numbers that may have the samples along their first dimension."""

BLOCKS: Final = (Tensor, np.ndarray)
"""Their types."""

Values = Block | list[Any] | tuple[Any, ...]
"""One of the things that a batch consists of: an item for each of its samples."""

PLAIN: Final = (int, float, str, bytes)
"""Types of lists that a program may have beside the tensors of a batch."""


def values_in(batch: Any) -> Iterable[Any]:
    """Return what a batch consists of; nothing, if it is none of the structures that are known here."""
    if isinstance(batch, (tuple, list)):
        return batch
    if isinstance(batch, Mapping):
        return batch.values()
    if _has_fields(batch):
        return [getattr(batch, one.name, None) for one in fields(batch)]
    return ()


def blocks_in(batch: Any) -> Iterator[Block]:
    """Yield the tensors and arrays in a batch, which may be nested."""
    if isinstance(batch, BLOCKS):
        yield batch
    else:
        for value in values_in(batch):
            yield from blocks_in(value)


def tensors_in(batch: Any) -> Iterator[Tensor]:
    """Yield the tensors in a batch, which may be nested."""
    return (block for block in blocks_in(batch) if isinstance(block, Tensor))


def mapped(batch: Any, function: Callable[[Values], Values]) -> Any:
    """Apply `function` to all tensors and arrays in a batch, and to the lists and tuples of numbers or text.

    Raises:
        BadOption: there is something else in it.
    """
    if isinstance(batch, BLOCKS):
        return function(batch)
    if batch is None or isinstance(batch, PLAIN):
        return batch
    if isinstance(batch, Mapping):
        return _with_values(batch, {key: mapped(value, function) for key, value in batch.items()})
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(mapped(value, function) for value in batch))
    if isinstance(batch, (tuple, list)):
        if batch and all(isinstance(value, PLAIN) for value in batch):
            return function(batch)
        return type(batch)(mapped(value, function) for value in batch)
    if _has_fields(batch):
        found = copy.copy(batch)
        for one in fields(batch):
            # Past what a frozen one says, and without what it does when it is made.
            object.__setattr__(found, one.name, mapped(getattr(batch, one.name), function))
        return found
    raise BadOption(
        "shard() can cut tensors, arrays, and tuples, lists, dicts and dataclasses of them, not "
        f"{type(batch).__name__}"
    )


def _with_values(batch: Mapping[Any, Any], values: dict[Any, Any]) -> Mapping[Any, Any]:
    """Return a mapping of the same type with other values, such as a batch of Hugging Face's collators."""
    if isinstance(batch, dict) or not isinstance(batch, MutableMapping):
        return values
    found = copy.copy(batch)
    found.update(values)
    return found


def _has_fields(batch: object) -> bool:
    return is_dataclass(batch) and not isinstance(batch, type)
