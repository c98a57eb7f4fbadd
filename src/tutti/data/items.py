"""Torch data sets, read item by item into arrays."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from tutti.data.arrays import Array, as_array
from tutti.errors import BadData


def is_dataset(value: object) -> bool:
    """Tell whether `value` is read item by item: a torch data set, or a loader to be refused."""
    return isinstance(value, Dataset | DataLoader)


def read_items(dataset: object, part: str) -> tuple[Array | Tensor, Array | Tensor]:
    """Return the inputs and the targets of a map-style torch data set, each sample read once.

    The data set's transforms are applied once, not in every epoch.

    Args:
        dataset: gives (input, target) for each index.
        part: "train", "validation" or "test", for messages.

    Raises:
        BadData: it has no length, or an item is no pair or differs in shape from the first; with its index.
    """
    if isinstance(dataset, DataLoader):
        raise BadData(f"the {part} part is a DataLoader; give the data set in it, loader.dataset")
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        kind = type(dataset).__name__
        raise BadData(
            f"the {part} part, a {kind}, has no length; give a data set with __len__ and __getitem__"
        )
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return dataset.tensors
    if len(dataset) == 0:
        raise BadData(f"the {part} part has no samples; give at least one")
    return _read_all(dataset, len(dataset), part)


def _read_all(dataset: Any, count: int, part: str) -> tuple[Array | Tensor, Array | Tensor]:
    first, goal = _pair(dataset, 0, part)
    template, targets = as_array(first, f"{part} inputs"), [as_array(goal, f"{part} targets")]
    inputs: Array = np.empty((count, *template.shape), template.dtype)
    inputs[0] = template
    for index in range(1, count):
        value, goal = _pair(dataset, index, part)
        array, target = as_array(value, f"{part} inputs"), as_array(goal, f"{part} targets")
        _refuse_other(array, template, f"input of item {index} of the {part} part")
        if target.shape != targets[0].shape:
            _refuse_other(target, targets[0], f"target of item {index} of the {part} part")
        inputs[index] = array
        targets.append(target)
    stacked: Array = np.stack(targets)
    # A tensor's channels come first already; what came as an array or a picture is laid out later.
    return (torch.from_numpy(inputs) if isinstance(first, Tensor) else inputs), stacked


def _pair(dataset: Any, index: int, part: str) -> tuple[object, object]:
    try:
        item = dataset[index]
    except Exception as error:
        error.add_note(f"This happened while item {index} of the {part} part was read.")
        raise
    if not isinstance(item, tuple | list) or len(item) != 2:
        found = f"{type(item).__name__} of {len(item)}" if isinstance(item, Sized) else type(item).__name__
        raise BadData(
            f"item {index} of the {part} part is a {found}; every item must be a pair (input, target)"
        )
    return item[0], item[1]


def _refuse_other(found: Array, first: Array, what: str) -> None:
    if found.shape != first.shape or found.dtype != first.dtype:
        raise BadData(
            f"the {what} has the shape {found.shape} and type {found.dtype}, but item 0 has {first.shape} "
            f"and {first.dtype}; all items need one shape and type (resize or pad them)"
        )
