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
    named = _by_name(first)
    inputs: dict[str, list[Array]] = {name: [] for name in named}
    targets: list[Array] = []
    for index in range(count):
        value, goal = _item(dataset, index, part) if index else (first, goal)
        found, target = _by_name(value), as_array(goal, f"{part} targets")
        if found.keys() != inputs.keys():
            raise BadData(
                f"item {index} of the {part} part has {_listed(found)}, and item 0 {_listed(inputs)}; all "
                "items need the same inputs"
            )
        for name, one in found.items():
            inputs[name].append(
                _input(f"input{_called(name)} of item {index} of the {part} part", one, inputs[name])
            )
        if targets:
            refuse_other(target, targets[0], f"target of item {index} of the {part} part")
        targets.append(target)
    # A tensor's channels come first already; what came as an array or a picture is laid out later.
    whole = {name: _together(one, isinstance(named[name], Tensor), part) for name, one in inputs.items()}
    stacked: Array = np.stack(targets)
    if isinstance(first, Mapping):
        return whole, stacked
    return (whole[_ALONE] if _ALONE in whole else tuple(whole.values())), stacked


def _is_pair(dataset: TensorDataset) -> bool:
    """Tell whether a data set gives two tensors as they are: a class derived from it may change them."""
    return len(dataset.tensors) == 2 and type(dataset).__getitem__ is TensorDataset.__getitem__


_ALONE: Final = ""
"""The name of the only input."""


def _input(what: str, value: object, before: list[Array]) -> Array:
    """Return an input of an item; it may differ from that of the first in its length alone."""
    array = as_array(value, what)
    if array.dtype.kind in "US":
        raise BadData(
            f"the {what} is a text, '{str(value)[:40]}'; make numbers of it, such as the tokens that a "
            "tokenizer gives"
        )
    if not before:
        return array
    first = before[0]
    if array.ndim and not array.size:
        return array.reshape(0, *first.shape[1:]).astype(first.dtype)  # Nothing has no type of its own.
    if not (
        array.ndim
        and array.ndim == first.ndim
        and array.shape[1:] == first.shape[1:]
        and array.dtype == first.dtype
    ):
        refuse_other(array, first, what)
    return array


def _together(arrays: list[Array], tensors: bool, part: str) -> object:
    """Return an input of all items."""
    if len({len(one) for one in arrays if one.ndim}) > 1:
        return sequences(arrays, f"{part} inputs")
    stacked: Array = np.stack(arrays)
    return torch.from_numpy(stacked) if tensors else stacked


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
