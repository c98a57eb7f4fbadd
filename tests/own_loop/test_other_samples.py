"""Ranks whose data sets are not the same, or not in the same order, are told so before they train."""

from __future__ import annotations

import math
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
from tutti.own_loop.origins import SampleCounts

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


@pytest.mark.parametrize("other", [[0.5, 1.75], [0.5, "1.5"], [0.5]], ids=str)
def test_numbers_in_lists_are_compared(other: list[Any]) -> None:
    assert alike([0.5, 1.5], [0.5, 1.5])
    assert not alike([0.5, 1.5], other)


def changed(values: torch.Tensor, at: tuple[int, ...], by: Any) -> torch.Tensor:
    """The same with another number in a place."""
    found = values.clone()
    found[at] += by
    return found


ONES, COMPLEX = torch.ones(64, 100), torch.ones(4, 3, dtype=torch.complex64)

DIFFERENT = {
    "dicts": ([{"a": 1.0}], [{"a": 2.0}]),
    "large integers": (torch.tensor([10**9]), torch.tensor([10**9 + 1])),
    "integers in lists": ([1, 2], [1, 3]),
    "truth values": ([True, False], [True, True]),
    "integers of numpy": ([np.int64(1)], [np.int64(2)]),
    "ends of lists": ([[1, 2], [3]], [[1], [2, 3]]),
    "one number": (ONES, changed(ONES, (5, 51), 5.0)),
    "one number of few": (ONES[:, :5], changed(ONES[:, :5], (5, 1), 0.5)),
    "small fractions": (ONES / 4, ONES / 2),
    "imaginary parts": (COMPLEX, changed(COMPLEX, (1, 2), 1j)),
    "order of tensors": (TensorDataset(ONES, 2 * ONES), TensorDataset(2 * ONES, ONES)),
    "more than rounding": (ONES, ONES * (1 + 1.5e-4)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_other_values_are_another_fingerprint(name: str) -> None:
    known, other = DIFFERENT[name]
    assert alike(known, known)
    assert not alike(known, other)


def test_of_many_and_large_samples_a_few_numbers_are_looked_at() -> None:
    many, large = torch.zeros(640, 2), torch.zeros(4, 640)
    assert alike(many, changed(many, (639, 0), 1.0))
    assert alike(large, changed(large, (3, 639), 1.0))
    assert not alike(many, changed(many, (630, 0), 1.0))
    assert not alike(large, changed(large, (3, 630), 1.0))


def test_all_indices_of_a_subset_are_looked_at() -> None:
    indices = list(range(640))
    swapped = [*indices[:638], 639, 638]
    dataset = TensorDataset(torch.zeros(640, 1))
    assert alike(Subset(dataset, indices), Subset(dataset, list(indices)))
    assert not alike(Subset(dataset, indices), Subset(dataset, swapped))


@pytest.mark.parametrize(
    "values",
    [
        torch.zeros(0, 3),
        torch.eye(3).to_sparse(),
        torch.zeros(3, device="meta"),
        torch.tensor([math.nan, math.inf]),
    ],
    ids=["none", "sparse", "meta", "not finite"],
)
def test_tensors_that_have_no_numbers_to_compare_are_like_each_other(values: torch.Tensor) -> None:
    assert alike([values], [values.clone()])


def test_data_that_contains_itself_is_looked_at_too() -> None:
    dataset, listed, named = Listed(["a-1"], np.zeros((1, 1))), list[Any]([1.0]), dict[str, Any](a=1.0)
    dataset.whole = dataset  # type: ignore[attr-defined]
    listed.append(listed)
    named["all"] = named
    for known in (dataset, listed, [named]):
        assert alike(known, known)


@pytest.mark.parametrize(
    ("make", "around"),
    [(lambda value: TensorDataset(torch.tensor([value])), Around), (float, lambda inner: [inner])],
    ids=["data sets", "lists"],
)
def test_nested_data_are_looked_at(make: Callable[[float], Any], around: Callable[[Any], Any]) -> None:
    known, other = make(1.0), make(2.0)
    for _ in range(7):
        known, other = around(known), around(other)
    assert not alike(known, other)


def test_attributes_of_a_data_set_that_are_not_of_its_samples_are_not_compared() -> None:
    here, there = (Listed(["a-1"], np.zeros((1, 2))) for _ in range(2))
    for rank, dataset in enumerate((here, there)):
        dataset.rank, dataset.scale = rank, torch.tensor(float(rank))  # type: ignore[attr-defined]
        dataset.seen = [str(rank)] * 2  # type: ignore[attr-defined]
    assert alike(here, there)


def test_data_sets_in_a_dict_are_compared() -> None:
    class Named(Dataset[Any]):
        def __init__(self, seed: int) -> None:
            self.parts = {"train": subset(seed)}

        def __len__(self) -> int:
            return 11

    assert alike(Named(1), Named(1))
    assert not alike(Named(1), Named(2))


def test_a_data_set_that_nothing_can_refer_to_weakly_is_compared() -> None:
    class Slotted:
        __slots__ = ("__dict__",)

        def __init__(self, seed: int) -> None:
            self.order = order(seed)

        def __len__(self) -> int:
            return 11

    assert alike(Slotted(1), Slotted(1))
    assert not alike(Slotted(1), Slotted(2))


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
