"""Torch data sets are read once, item by item, into arrays."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from tutti.data.items import unloaded
from tutti.data.sources import read_source
from tutti.errors import BadData


class Items(Dataset):
    """Gives what a list holds, and counts how often."""

    def __init__(self, items: list) -> None:
        self.items, self.asked = items, []

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> object:
        self.asked.append(index)
        return self.items[index]


def pairs(count: int) -> list:
    return [(torch.full((2, 3), float(i)), i % 2) for i in range(count)]


def test_each_sample_of_a_data_set_is_read_once(opened):
    data = Items(pairs(20))
    found = opened(data, validation=0)
    assert data.asked == list(range(20))
    assert found.train.inputs[:, 0, 0].tolist() == list(range(20))
    assert found.train.targets.tolist() == [0, 1] * 10
    assert found.classes == 2
    assert found.shape == (2, 3)


def test_a_tensor_data_set_is_taken_whole(opened):
    x, y = torch.rand(12, 4), torch.arange(12) % 3
    found = opened(TensorDataset(x, y), validation=0)
    assert found.name == "TensorDataset"
    assert torch.equal(found.train.inputs, x)
    assert torch.equal(found.train.targets, y)


def test_subsets_and_float_targets_are_read(opened):
    x, y = torch.rand(12, 4), torch.rand(12, 2)
    found = opened(Subset(TensorDataset(x, y), [3, 1, 5]), validation=0)
    assert torch.equal(found.train.inputs, x[[3, 1, 5]])
    assert torch.equal(found.train.targets, y[[3, 1, 5]])
    assert found.classes is None


def test_a_pair_of_data_sets_is_train_and_test(opened):
    found = opened((Items(pairs(10)), Items(pairs(4))), validation=0.2)
    assert (len(found.train), len(found.validation), len(found.test)) == (8, 2, 4)


def test_pictures_of_a_data_set_become_images_with_channels_first(opened):
    random = np.random.default_rng(0)
    pictures = [random.integers(0, 256, (8, 9, 3), dtype=np.uint8) for _ in range(6)]
    data = Items([(picture, i % 2) for i, picture in enumerate(pictures)])
    data.classes = ["cat", "dog"]
    found = opened(data, validation=0)
    assert found.shape == (3, 8, 9)
    assert found.labels == ("cat", "dog")
    assert torch.equal(found.train.inputs[2], torch.from_numpy(pictures[2]).permute(2, 0, 1))


def test_tensors_keep_their_order_of_dimensions(opened):
    found = opened(Items([(torch.zeros(8, 9, 3), 0), (torch.zeros(8, 9, 3), 1)]), validation=0)
    assert found.shape == (8, 9, 3)


def test_an_error_inside_an_item_says_which(opened):
    class Broken(Items):
        def __getitem__(self, index: int) -> object:
            if index == 2:
                raise RuntimeError("no such picture")
            return super().__getitem__(index)

    with pytest.raises(RuntimeError, match="no such picture") as caught:
        opened(Broken(pairs(5)))
    assert any("item 2 of the train part" in note for note in caught.value.__notes__)


class Doubling(DataLoader):
    def __iter__(self) -> Iterator[object]:
        for inputs, targets in super().__iter__():
            yield 2 * inputs, targets


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[object]:
        return iter(pairs(3))


ITEMS = Items(pairs(8))


def test_of_a_loader_its_data_set_and_batch_size_are_taken():
    *found, used = unloaded(DataLoader(ITEMS, batch_size=4, shuffle=True, num_workers=2))
    assert found == [ITEMS, 4]
    assert used.startswith("of the DataLoader are taken: its data set, its batch size 4; samples")


@pytest.mark.parametrize(
    "loader",
    [
        DataLoader(ITEMS, sampler=WeightedRandomSampler([1.0] * 8, 8)),
        DataLoader(ITEMS, sampler=RandomSampler(ITEMS, replacement=True)),
        DataLoader(ITEMS, sampler=RandomSampler(ITEMS, num_samples=3)),
        DataLoader(ITEMS, batch_sampler=[[0, 1], [2]]),
        DataLoader(ITEMS, batch_size=None),
        DataLoader(ITEMS, collate_fn=len),
        Doubling(ITEMS),
        DataLoader(Stream()),
    ],
)
def test_a_loader_that_does_more_than_load_is_refused(loader):
    with pytest.raises(BadData, match=r"loader\.dataset"):
        unloaded(loader)


class Brighter(TensorDataset):
    """A data set of tensors whose class changes what it gives."""

    def __getitem__(self, index):
        inputs, target = super().__getitem__(index)
        return inputs + 10, target


def test_what_a_class_makes_of_its_tensors_is_taken(opened):
    data = opened(Brighter(torch.arange(4.0)[:, None], torch.arange(4) % 2), validation=0)
    assert data.train.stored_inputs[:, 0].tolist() == [10, 11, 12, 13]


class Named(TensorDataset):
    """A data set with names of its classes, as those of torchvision have them."""

    def __init__(self, *names):
        super().__init__(torch.ones(4, 2), torch.arange(4) % len(names))
        self.classes = list(names)


def test_data_sets_whose_numbers_stand_for_other_classes_are_refused(opened):
    assert opened((Named("ant", "bee"), Named("ant", "bee")), validation=0).labels == ("ant", "bee")
    with pytest.raises(BadData, match="the test part of the data has other class names"):
        opened((Named("ant", "bee", "cow"), Named("bee", "cow")))


def test_lists_of_dicts_are_read_as_data_sets_of_such_items():
    items = [{"image": np.full((2, 3), k / 2), "age": k / 4, "label": k % 2} for k in range(6)]
    contents = read_source((items, items[:2]), {})
    (train, targets), (test, _) = contents.parts["train"], contents.parts["test"]
    assert train.names == test.names == ("image", "age")
    assert [one.rows.shape for one in train.columns] == [(6, 2, 3), (6, 1)]
    assert [one.rows.shape for one in test.columns] == [(2, 2, 3), (2, 1)]
    assert train.columns[1].rows[:, 0].tolist() == [k / 4 for k in range(6)]
    assert targets.tolist() == [0, 1] * 3
    assert list(read_source(items, {}).parts) == ["train"]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Items([*pairs(7), (torch.zeros(2, 4), 0)]), r"inputs have the shape \(2, 4\) in sample 7"),
        (Items([("a cat", 0), ("a horse", 1)]), "input of item 0 of the train part is a text, 'a cat'"),
        (Items([*pairs(4), (torch.zeros(2, 3), [0, 1])]), "targets have the shape"),
        (Items([*pairs(3), torch.zeros(3)]), "item 3 of the train part is a Tensor of 3; every item"),
        (Items([*pairs(3), (1, 2, 3)]), "item 3 of the train part is a tuple of 3; every item"),
        (Items([]), "the train part has no samples"),
        (Stream(), "the train part, a Stream, has no length"),
        (DataLoader(ITEMS), r"is a DataLoader; give the data set in it, loader\.dataset"),
    ],
)
def test_items_that_cannot_be_used_are_named(opened, data, said):
    with pytest.raises(BadData, match=said):
        opened(data)
