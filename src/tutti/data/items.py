"""Map-style torch data sets, read once, sample by sample.

(x, y)                              an input and a target
({"image": x, "age": z}, y)         several inputs by name, and a target
((x, z), y)                         several by position
{"image": x, "age": z, "label": y}  the same by name; one of `TARGET_WORDS` is the target

An input whose first size differs from sample to sample, such as a list of tokens, is a sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from tutti.data.arrays import as_array
from tutti.data.columns import Column
from tutti.data.rows import Array
from tutti.data.structure import sequences
from tutti.data.tables import TARGET_WORDS
from tutti.errors import BadData


def unloaded(loader: DataLoader[Any]) -> tuple[object, int, str]:
    """Return the data set of a DataLoader, its batch size, and a sentence that says what is used of it."""
    sampler, samples = loader.sampler, cast("Sized", loader.dataset)
    plain = (
        not isinstance(samples, IterableDataset)
        and type(loader).__iter__ is DataLoader.__iter__
        and type(sampler) in (SequentialSampler, RandomSampler)
        and type(loader.batch_sampler) is BatchSampler
        and loader.collate_fn is default_collate
    )
    if plain and isinstance(sampler, RandomSampler):  # It may draw with replacement, or fewer or more.
        plain = not sampler.replacement and sampler.num_samples == len(samples)
    if not plain or loader.batch_size is None:
        raise BadData(
            f"the {type(loader).__name__} has a sampler, a collate_fn, an __iter__ or a data set without "
            "length, which are not used here; give its data set, loader.dataset, with --sampling or "
            "--augment, or write your own loop, over tutti.shard(loader)"
        )
    last = "; a last batch that is not full counts, too" if loader.drop_last else ""
    used = (
        f"of the DataLoader are taken: its data set, its batch size {loader.batch_size}; samples are "
        f"read once, and shuffled again in each epoch{last}"
    )
    return samples, loader.batch_size, used


def read_items(dataset: object, part: str) -> tuple[object, object]:
    """Return the inputs and the targets of a map-style torch data set, each sample read once.

    The data set's transforms are applied once, not in every epoch. Errors name the item.
    """
    if isinstance(dataset, DataLoader):
        raise BadData(f"the {part} part is a DataLoader; give the data set in it, loader.dataset")
    if isinstance(dataset, IterableDataset) or not isinstance(dataset, Sized):
        kind = type(dataset).__name__
        raise BadData(
            f"the {part} part, a {kind}, has no length; give a data set with __len__ and __getitem__"
        )
    if isinstance(dataset, TensorDataset) and _is_pair(dataset):
        x, y = dataset.tensors
        return x, y
    if len(dataset) == 0:
        raise BadData(f"the {part} part has no samples; give at least one")
    items = [_item(dataset, index, part) for index in range(len(dataset))]
    first = items[0][0]
    for index, (named, _) in enumerate(items):
        if named.keys() != first.keys():
            raise BadData(
                f"item {index} of the {part} part has the inputs {_listed(named)}, and item 0 "
                f"the inputs {_listed(first)}; all items need the same inputs"
            )
    whole = {
        name: _together([named[name] for named, _ in items], f"input{f' {name!r}' if name else ''}", part)
        for name in first
    }
    targets = _together([goal for _, goal in items], "target", part)
    if isinstance(targets, Column):
        raise BadData(f"the targets of the {part} part differ in their lengths; pad them")
    if _ALONE in whole:
        return whole[_ALONE], targets
    return (tuple(whole.values()) if "0" in whole else whole), targets


def _is_pair(dataset: TensorDataset) -> bool:
    """Return whether a data set gives two tensors as they are: a class derived from it may change them."""
    return len(dataset.tensors) == 2 and type(dataset).__getitem__ is TensorDataset.__getitem__


_ALONE: Final = ""
"""The name of the only input."""


def _together(values: list[object], what: str, part: str) -> object:
    """Return an input, or the target, of all items. A tensor's channels already come first."""
    arrays = [as_array(one, f"{what}s") for one in values]
    if any(one.dtype.kind in "US" for one in arrays) and what != "target":
        raise BadData(
            f"the {what} of item 0 of the {part} part is a text, '{str(values[0])[:40]}'; make numbers of "
            "it, such as the tokens that a tokenizer gives"
        )
    if len({one.shape for one in arrays}) > 1:
        return sequences(arrays, f"{part} {what}s")
    stacked: Array = np.stack(arrays)
    return torch.from_numpy(stacked) if isinstance(values[0], Tensor) and what != "target" else stacked


def _item(dataset: Any, index: int, part: str) -> tuple[Mapping[str, object], object]:
    """Return the inputs of an item by their names, or by their numbers, and its target."""
    try:
        item = dataset[index]
    except Exception as error:
        error.add_note(f"This happened while item {index} of the {part} part was read.")
        raise
    if isinstance(item, Mapping):
        named = [name for name in item if str(name).lower() in TARGET_WORDS]
        if len(named) != 1 or len(item) < 2:
            raise BadData(
                f"item {index} of the {part} part is a dict of {', '.join(map(str, item)) or 'nothing'}; it "
                "needs inputs and one entry that is called 'target' or 'label', or give ({...}, target)"
            )
        return {name: one for name, one in item.items() if name != named[0]}, item[named[0]]
    if not isinstance(item, tuple | list) or len(item) != 2:
        found = f"{type(item).__name__} of {len(item)}" if isinstance(item, Sized) else type(item).__name__
        raise BadData(
            f"item {index} of the {part} part is a {found}; every item must be a pair (input, target); "
            "several inputs are ((first, second), target), or a dict"
        )
    value, target = item
    if isinstance(value, tuple) and any(isinstance(one, np.ndarray | Tensor | list) for one in value):
        value = {str(number): one for number, one in enumerate(value)}
    return (value if isinstance(value, Mapping) else {_ALONE: value}), target


def _listed(inputs: Mapping[str, object]) -> str:
    return ", ".join(map(str, inputs))
