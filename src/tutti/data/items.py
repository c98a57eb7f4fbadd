"""Map-style data sets of torch, read once, sample by sample.

(x, y)                              an input and a target
({"image": x, "age": z}, y)         several inputs by name, and a target
((x, z), y)                         several by position
{"image": x, "age": z, "label": y}  the same by name; one of `TARGET_WORDS` is the target

An input whose first size differs from sample to sample, such as a list of tokens, is a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)
from typing_extensions import override

from tutti.data.arrays import as_array
from tutti.data.rows import Array
from tutti.data.structure import sequences
from tutti.errors import BadData

TARGETS: Final = ("y", "targets", "labels", "target")
"""Words for targets in keys."""

TARGET_WORDS: Final = frozenset({*TARGETS, "label", "class", "cls"})
"""Names of a column, or of an entry of an item, that is to be predicted."""


@dataclass(frozen=True)
class Collated(Dataset[object]):
    """A data set whose items go through the `collate_fn` of a DataLoader, one by one.

    Attributes:
        dataset: gives the items.
        collate: makes a batch of a list of items.
    """

    dataset: Any
    collate: Callable[[list[object]], object]

    def __len__(self) -> int:
        return len(self.dataset)

    @override
    def __getitem__(self, index: int) -> object:
        return _only(self.collate([self.dataset[index]]))


@dataclass(frozen=True)
class Unloaded:
    """The contents of a DataLoader, whose shuffling and workers are not needed.

    Attributes:
        dataset: its data set; one that goes through its `collate_fn`, if that is not torch's own.
        batch_size: its batch size.
        said: what is taken of it, in a line.
    """

    dataset: object
    batch_size: int
    said: str

    @classmethod
    def of(cls, loader: DataLoader[Any]) -> Unloaded:
        """Take a DataLoader apart.

        Raises:
            BadData: it decides by a sampler of its own which samples are in which batch, or by its class
                what becomes of them.
        """
        kind = type(loader)
        if isinstance(loader.dataset, IterableDataset):
            raise BadData(
                f"the DataLoader's data set, a {type(loader.dataset).__name__}, has no length; give one "
                "with __len__ and __getitem__, or write a loop of your own, over tutti.shard(loader)"
            )
        if kind.__iter__ is not DataLoader.__iter__:
            raise BadData(
                f"the DataLoader's class, {kind.__name__}, has an __iter__ of its own, which is not called "
                "here; give its data set, loader.dataset, and what __iter__ does as --augment, or write "
                "a loop of your own, over tutti.shard(loader)"
            )
        sampler, samples = loader.sampler, cast("Sized", loader.dataset)
        own = type(sampler) not in (SequentialSampler, RandomSampler)
        if isinstance(sampler, RandomSampler):  # which may draw with replacement, or fewer or more
            own = own or sampler.replacement or sampler.num_samples != len(samples)
        if own or loader.batch_size is None or type(loader.batch_sampler) is not BatchSampler:
            chosen = type(loader.sampler if own else loader.batch_sampler).__name__
            raise BadData(
                f"the DataLoader chooses its samples by a {chosen}, which is not used here; give its data "
                "set, loader.dataset, and --sampling for samples that are to be drawn more often than others"
            )
        dataset: object = loader.dataset
        parts = ["data set", f"batch size {loader.batch_size}"]
        if loader.collate_fn is not default_collate:
            dataset = Collated(dataset, loader.collate_fn)
            parts.append("collate_fn, sample by sample")
        last = "; a last batch that is not full counts, too" if loader.drop_last else ""
        said = (
            f"of the DataLoader are taken: its {', its '.join(parts)}; samples are read once, and shuffled "
            f"anew in each epoch{last}"
        )
        return cls(dataset, loader.batch_size, said)


def read_items(dataset: object, part: str) -> tuple[object, Array | Tensor]:
    """Return the inputs and the targets of a map-style torch data set, each sample read once.

    The data set's transforms are applied once, not in every epoch.

    Args:
        dataset: gives an item, as the module's docstring lists them, for each index.
        part: "train", "validation" or "test", for messages.

    Returns:
        The inputs as `tutti.data.structure.taken_apart` takes them, and the targets.

    Raises:
        BadData: it has no length, or an item is no pair or differs from the first in more than the length of
            a sequence; with its index.
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
    count = len(dataset)
    if count == 0:
        raise BadData(f"the {part} part has no samples; give at least one")
    first, goal = _item(dataset, 0, part)
    inputs = {
        name: _Input(f"input{_called(name)}", part, one, count) for name, one in _by_name(first).items()
    }
    targets = [as_array(goal, f"{part} targets")]
    for index in range(1, count):
        value, goal = _item(dataset, index, part)
        found, target = _by_name(value), as_array(goal, f"{part} targets")
        if found.keys() != inputs.keys():
            raise BadData(
                f"item {index} of the {part} part has {_listed(found)}, and item 0 {_listed(inputs)}; all "
                "items need the same inputs"
            )
        for name, one in inputs.items():
            one.add(index, found[name])
        if target.shape != targets[0].shape:
            refuse_other(target, targets[0], f"target of item {index} of the {part} part")
        targets.append(target)
    stacked: Array = np.stack(targets)
    whole = {name: one.whole() for name, one in inputs.items()}
    if isinstance(first, Mapping):
        return whole, stacked
    return (whole[_ALONE] if _ALONE in whole else tuple(whole.values())), stacked


def _is_pair(dataset: TensorDataset) -> bool:
    """Tell whether a data set gives two tensors as they are: a class derived from it may change them."""
    return len(dataset.tensors) == 2 and type(dataset).__getitem__ is TensorDataset.__getitem__


_ALONE: Final = ""
"""The name of the only input."""


class _Input:
    """One input of all items, put together as these are read.

    Args:
        what: the input, for messages.
        part: of the data set.
        first: of the first item.
        count: how many items there are.
    """

    def __init__(self, what: str, part: str, first: object, count: int) -> None:
        self._what, self._part = what, part
        self._first = as_array(first, f"{part} inputs")
        if self._first.dtype.kind in "US":
            raise BadData(
                f"the {what} of item 0 of the {part} part is a text, '{str(first)[:40]}'; make numbers of "
                "it, such as the tokens that a tokenizer gives"
            )
        # A tensor's channels come first already; what came as an array or a picture is laid out later.
        self._is_tensor = isinstance(first, Tensor)
        self._rows: Array = np.empty((count, *self._first.shape), self._first.dtype)
        self._rows[0] = self._first
        self._sequences: list[Array] | None = None

    def add(self, index: int, value: object) -> None:
        """Note the input of an item.

        Raises:
            BadData: it differs from that of the first in more than its length.
        """
        array, first = as_array(value, f"{self._part} inputs"), self._first
        if array.ndim and not array.size:
            array = array.reshape(0, *first.shape[1:]).astype(first.dtype)  # Nothing has no type of its own.
        if array.shape != first.shape or array.dtype != first.dtype:
            lengths_alone = array.ndim and array.ndim == first.ndim and array.shape[1:] == first.shape[1:]
            if not lengths_alone or array.dtype != first.dtype:
                refuse_other(array, first, f"{self._what} of item {index} of the {self._part} part")
            if self._sequences is None:
                self._sequences = [*self._rows[:index]]
        if self._sequences is None:
            self._rows[index] = array
        else:
            self._sequences.append(array)

    def whole(self) -> object:
        """The input of all items."""
        if self._sequences is not None:
            return sequences(self._sequences, f"{self._part} inputs")
        return torch.from_numpy(self._rows) if self._is_tensor else self._rows


def _by_name(value: object) -> Mapping[str, object]:
    """Return the inputs of an item by their names, or by their numbers; an only one without."""
    if isinstance(value, Mapping):
        return value
    if isinstance(value, tuple) and any(isinstance(one, np.ndarray | Tensor | list) for one in value):
        return {str(number): one for number, one in enumerate(value)}
    return {_ALONE: value}


def _item(dataset: Any, index: int, part: str) -> tuple[object, object]:
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
    return item[0], item[1]


def _called(name: str) -> str:
    return f" '{name}'" if name else ""


def _listed(inputs: Mapping[str, object]) -> str:
    if not any(name and not name.isdigit() for name in inputs):
        return "one input" if len(inputs) == 1 else f"{len(inputs)} inputs"
    return f"the inputs {', '.join(map(str, inputs))}"


def refuse_other(found: Array, first: Array, what: str) -> None:
    """Refuse what differs from the first in shape or type."""
    if found.shape != first.shape or found.dtype != first.dtype:
        raise BadData(
            f"the {what} has the shape {found.shape} and type {found.dtype}, but item 0 has {first.shape} "
            f"and {first.dtype}; all items need one shape and type (resize or pad them)"
        )


def _only(batch: object) -> object:
    """Return the sample of a batch of one."""
    if isinstance(batch, Mapping):
        return {name: _only(one) for name, one in batch.items()}
    if isinstance(batch, tuple | list):
        return tuple(map(_only, batch))
    if isinstance(batch, Tensor | np.ndarray) and len(batch) == 1:
        return batch[0]
    raise BadData(
        f"the collate_fn makes a {type(batch).__name__} of a list of one sample; it must make tensors whose "
        "first size is the number of samples"
    )
