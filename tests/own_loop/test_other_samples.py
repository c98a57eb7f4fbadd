"""Ranks whose data sets are not the same, or not in the same order, are told so before they train."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, DataLoader, Dataset, DistributedSampler, Subset, TensorDataset
from torch.utils.weak import WeakIdKeyDictionary

from tests.own_loop.loops.base import FEATURES, fit, net, samples, sgd
from tests.own_loop.worlds import Worlds
from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.own_loop import distribute
from tutti.own_loop.fingerprints import are_alike, fingerprint, length_of
from tutti.own_loop.loop import OwnLoop

Make = Callable[[int], Iterable[Any]]
"""What a rank gives `shard`, by the seed of its split."""


class Listed(Dataset[Any]):
    """Of the kind that people write: what it has of each sample lies in attributes."""

    def __init__(self, names: list[str], inputs: np.ndarray[Any, Any]) -> None:
        self.names, self.inputs = names, inputs

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, at: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.as_tensor(self.inputs[at]), torch.tensor(int(self.names[at].split("-")[1]))


class Around(Dataset[Any]):
    """Another one with a transform."""

    def __init__(self, inner: Dataset[Any]) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)  # type: ignore[arg-type]

    def __getitem__(self, at: int) -> Any:
        return self.inner[at]


def order(seed: int, count: int = 11) -> list[int]:
    return np.random.default_rng(seed).permutation(count).tolist()


def tensors(seed: int) -> TensorDataset:
    known = samples()
    return TensorDataset(*(tensor[order(seed)] for tensor in known.tensors))


def inputs_alone(seed: int) -> TensorDataset:
    return TensorDataset(samples().tensors[0][order(seed)])


def subset(seed: int) -> Subset[Any]:
    return Subset(samples(), order(seed))


def nested(seed: int) -> Subset[Any]:
    return Subset(subset(seed), range(9))


def around(seed: int) -> Dataset[Any]:
    return Around(subset(seed))


def joined(seed: int) -> Dataset[Any]:
    return ConcatDataset([samples(), subset(seed)])


def names(seed: int) -> Dataset[Any]:
    return Listed([f"/home/{seed}/{at}-{at % 3}" for at in order(seed)], np.zeros((11, FEATURES)))


def arrays(seed: int) -> Dataset[Any]:
    return Listed(["a-1"] * 11, samples().tensors[0].numpy()[order(seed)])


def items(seed: int) -> list[Any]:
    return [samples()[at] for at in order(seed)]


DATASETS = [tensors, inputs_alone, subset, nested, around, joined, names, arrays, items]


@pytest.mark.parametrize("make", DATASETS)
def test_another_order_is_another_fingerprint(make: Callable[[int], Any]) -> None:
    assert alike(make(1), make(1))
    assert not alike(make(1), make(2))


def of_dataset(data: Any, looked: Any) -> list[int]:
    return fingerprint(length_of(data), data, looked)


def alike(known: object, other: object) -> bool:
    return are_alike(*(of_dataset(one, WeakIdKeyDictionary()) for one in (known, other)))


def changed(values: torch.Tensor, at: tuple[int, ...], by: Any) -> torch.Tensor:
    """The same with another number in a place."""
    found = values.clone()
    found[at] += by
    return found


ONES = torch.ones(64, 100)

DIFFERENT = {
    "large integers": (torch.tensor([10**9]), torch.tensor([10**9 + 1])),
    "ends of lists": ([[1, 2], [3]], [[1], [2, 3]]),
    "one number": (ONES, changed(ONES, (5, 51), 5.0)),
    "order of tensors": (TensorDataset(ONES, 2 * ONES), TensorDataset(2 * ONES, ONES)),
    "more than rounding": (ONES, ONES * (1 + 1.5e-4)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_values_are_another_fingerprint(name: str) -> None:
    known, other = DIFFERENT[name]
    assert alike(known, known)
    assert not alike(known, other)


def test_all_indices_of_a_subset_are_looked_at() -> None:
    indices = list(range(640))
    swapped = [*indices[:638], 639, 638]
    dataset = TensorDataset(torch.zeros(640, 1))
    assert alike(Subset(dataset, indices), Subset(dataset, list(indices)))
    assert not alike(Subset(dataset, indices), Subset(dataset, swapped))


def test_attributes_of_a_data_set_that_are_not_of_its_samples_are_not_compared() -> None:
    here, there = (Listed(["a-1"], np.zeros((1, 2))) for _ in range(2))
    for rank, dataset in enumerate((here, there)):
        dataset.rank, dataset.scale = rank, torch.tensor(float(rank))  # type: ignore[attr-defined]
        dataset.seen = [str(rank)] * 2  # type: ignore[attr-defined]
    assert alike(here, there)


def test_rounding_and_folders_make_no_other_fingerprint() -> None:
    known = samples()
    rounded = TensorDataset(known.tensors[0] * (1 + 1e-7), known.tensors[1])
    assert alike(rounded, known)
    here, there = (
        Listed([f"{folder}/a-{at}" for at in range(11)], np.zeros((11, 1))) for folder in ("/x", "/y/z")
    )
    assert alike(here, there)


def test_what_a_data_set_keeps_of_samples_it_has_read_is_not_compared() -> None:
    dataset, known = Listed(["a-1"] * 11, np.zeros((11, 2))), WeakIdKeyDictionary()
    before, untouched = of_dataset(dataset, known), of_dataset(Around(dataset), known)
    dataset.inputs[:4] = 1.0
    assert are_alike(untouched, of_dataset(Around(dataset), known))
    assert are_alike(before, of_dataset(Listed(["a-1"] * 11, np.zeros((11, 2))), WeakIdKeyDictionary()))


def train(comm: Communicator, make: Make, split: bool) -> str:
    """What a rank is told, and whether it has moved the weights."""
    distribute._loop = OwnLoop(comm)
    model = net()
    model, optimizer = distribute.distribute(model, sgd(model))
    before = model[0].weight.detach().clone()
    told = ""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        try:
            for inputs, targets in distribute.shard(make(comm.rank if split else 1)):
                optimizer.zero_grad()
                fit(model, inputs, targets).backward()
                optimizer.step()
        except BadOption as error:
            told = str(error)
    distribute._loop = None
    moved = not torch.equal(before, model[0].weight)
    return ("moved" if moved else "") + told + "".join(str(one.message) for one in seen)


def loader(seed: int) -> Iterable[Any]:
    return DataLoader(subset(seed), 4, shuffle=True)


def loader_of_others(seed: int) -> Iterable[Any]:
    return DataLoader(Subset(samples(), range(8 + seed)), 4)


def distributed(seed: int) -> Iterable[Any]:
    return DataLoader(samples(), 4, sampler=DistributedSampler(samples(), 2, 0))


def generated(seed: int) -> Iterable[Any]:
    inputs, targets = samples().tensors
    for part in np.array_split(order(seed), 3):
        yield inputs[part], targets[part]


def generated_of_others(seed: int) -> Iterable[Any]:
    inputs, targets = samples().tensors
    yield inputs[: 8 + seed], targets[: 8 + seed]


@pytest.mark.parametrize(
    ("make", "wanted"),
    [
        (loader, "hold different samples, 11 on each"),
        (loader_of_others, r"by rank, \[8, 9\]"),
        (generated_of_others, r"by rank, \[8, 9\]"),
    ],
)
def test_ranks_with_other_samples_are_refused_before_the_first_step(
    worlds: Worlds, make: Make, wanted: str
) -> None:
    for told in worlds.call(partial(train, make=make, split=True), 2):
        assert "moved" not in told
        assert "seed" in told
        assert re.search(wanted, told)


def test_a_sampler_that_deals_to_ranks_itself_is_refused(worlds: Worlds) -> None:
    for told in worlds.call(partial(train, make=distributed, split=True), 2):
        assert told.startswith("the loader has a DistributedSampler")


def test_ranks_that_make_other_batches_are_warned(worlds: Worlds) -> None:
    for told in worlds.call(partial(train, make=generated, split=True), 2):
        assert told.startswith("moved")
        assert "first batches differ" in told


@pytest.mark.parametrize("make", [loader, generated])
def test_ranks_with_the_same_samples_train(worlds: Worlds, make: Make) -> None:
    assert worlds.call(partial(train, make=make, split=False), 2) == ["moved", "moved"]
