"""Ranks whose data sets are not the same, or not in the same order, are told so before they train."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, cast

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
from tutti.own_loop.fingerprints import Fingerprint, of_dataset
from tutti.own_loop.loop import OwnLoop, SampleCounts

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
    mine, same, other = (of_dataset(make(seed), WeakIdKeyDictionary()) for seed in (1, 1, 2))
    assert mine.is_like(same)
    assert not mine.is_like(other)
    assert mine.is_like(type(mine).of_words(mine.words()))


@pytest.mark.parametrize("other", [[0.5, 1.75], [0.5, "1.5"], [0.5]], ids=str)
def test_numbers_in_lists_are_compared(other: list[Any]) -> None:
    known = of_dataset([0.5, 1.5], WeakIdKeyDictionary())
    assert known.is_like(of_dataset([0.5, 1.5], WeakIdKeyDictionary()))
    assert not known.is_like(of_dataset(other, WeakIdKeyDictionary()))


@pytest.mark.parametrize(
    ("known", "other"),
    [([{"a": 1.0}], [{"a": 2.0}]), (torch.tensor([10**9]), torch.tensor([10**9 + 1]))],
    ids=["dicts", "integers"],
)
def test_dicts_and_integers_are_compared(known: object, other: object) -> None:
    assert of_dataset(known, WeakIdKeyDictionary()).is_like(of_dataset(known, WeakIdKeyDictionary()))
    assert not of_dataset(known, WeakIdKeyDictionary()).is_like(of_dataset(other, WeakIdKeyDictionary()))


def test_indices_that_are_no_numbers_are_compared() -> None:
    found = [Fingerprint(), Fingerprint(), Fingerprint()]
    for one, indices in zip(found, (["a", "b"], ["a", "b"], ["a", "c"]), strict=True):
        one.note_indices(cast("list[int]", indices))
    assert found[0].is_like(found[1])
    assert not found[0].is_like(found[2])


def test_rounding_and_folders_make_no_other_fingerprint() -> None:
    known = samples()
    rounded = TensorDataset(known.tensors[0] * (1 + 1e-7), known.tensors[1])
    assert of_dataset(rounded, WeakIdKeyDictionary()).is_like(of_dataset(known, WeakIdKeyDictionary()))
    here, there = (
        Listed([f"{folder}/a-{at}" for at in range(11)], np.zeros((11, 1))) for folder in ("/x", "/y/z")
    )
    assert of_dataset(here, WeakIdKeyDictionary()).is_like(of_dataset(there, WeakIdKeyDictionary()))


def test_what_a_data_set_keeps_of_samples_it_has_read_is_not_compared() -> None:
    dataset, known = Listed(["a-1"] * 11, np.zeros((11, 2))), WeakIdKeyDictionary()
    before, untouched = of_dataset(dataset, known), of_dataset(Around(dataset), known)
    dataset.inputs[:4] = 1.0
    assert untouched.is_like(of_dataset(Around(dataset), known))
    assert before.is_like(of_dataset(Listed(["a-1"] * 11, np.zeros((11, 2))), WeakIdKeyDictionary()))


def train(comm: Communicator, make: Make, split: bool) -> str:
    """What a rank is told, and whether it has moved the weights."""
    distribute._loop = OwnLoop(comm, SampleCounts(1, comm.size))
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
