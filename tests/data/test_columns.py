"""Several inputs of a sample, and sequences of unequal length: read, stored, dealt and given to models."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from tests.data.test_items import Items
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import DataSet, Part, SamplePool, open_pool
from tutti.data.columns import Column, Columns
from tutti.data.sources import read_source
from tutti.errors import BadData
from tutti.run.build import trained_on
from tutti.run.evaluate import seen_as

PIXELS = np.random.default_rng(0).integers(0, 256, (20, 4, 4), dtype=np.uint8)
AGES = np.linspace(0, 1, 20)
LABELS = np.arange(20) % 4
SEQUENCES = [[10 * number + step for step in range(number % 3 + 1)] for number in range(20)]
NAMED = {"x": {"pixels": PIXELS, "age": AGES}, "y": LABELS}


def test_inputs_by_name_are_those_that_each_is_alone(opened):
    found = opened(NAMED, validation=0.2)
    alone = [opened((x, LABELS), validation=0.2) for x in (PIXELS, AGES)]
    assert found.shape == {"pixels": (1, 4, 4), "age": (1,)}
    some = torch.tensor([3, 0, 3])
    for part in ("train", "validation"):
        seen, targets = getattr(found, part).take(some)
        for name, one in zip(("pixels", "age"), alone, strict=True):
            expected, labels = getattr(one, part).take(some)
            assert torch.equal(seen[name], expected)
            assert torch.equal(targets, labels)
    assert found.nbytes == sum(one.nbytes for one in alone) - alone[0].train.stored_targets.nbytes


def test_inputs_in_a_tuple_stay_in_their_order(opened):
    found = opened(((AGES, PIXELS), LABELS), validation=0)
    assert found.shape == ((1,), (1, 4, 4))
    ages, pixels = found.train.take(torch.arange(2))[0]
    assert (ages.shape, pixels.shape) == ((2, 1), (2, 1, 4, 4))
    tests = opened((((AGES, PIXELS), LABELS), ((AGES[:5], PIXELS[:5]), LABELS[:5])), validation=0).test
    assert tests.take(torch.tensor([4]))[0][0].item() == pytest.approx(AGES[4])


def test_sequences_are_padded_to_the_longest_of_those_that_are_taken(opened):
    part = opened((SEQUENCES, LABELS), validation=0).train
    assert part.shape == (3,)
    padded, lengths = part.take(torch.tensor([3, 1, 0]))[0]
    assert padded.tolist() == [[30, 0], [10, 11], [0, 0]]
    assert padded.dtype == lengths.dtype == torch.int64
    assert lengths.tolist() == [1, 2, 1]
    assert part.take(torch.arange(0))[0][0].shape == (0, 1)
    parts = opened(((SEQUENCES, LABELS), (SEQUENCES[5:9], LABELS[5:9])), validation=0.2)
    padded, lengths = parts.test.take(torch.arange(3))[0]
    assert padded.tolist() == [[50, 51, 52], [60, 0, 0], [70, 71, 0]]
    assert lengths.tolist() == [3, 1, 2]


def test_sequences_of_small_numbers_leave_room_for_larger_ones_of_another_part(opened):
    small = [np.full(number % 3 + 1, number, np.int8) for number in range(6)]
    large = [np.full(number % 2 + 1, 300 + number) for number in range(6)]
    labels = np.arange(6) % 2
    test = opened(((small, labels), (large, labels)), validation=0).test
    assert test.take(torch.tensor([1]))[0][0].tolist() == [[301, 301]]


def test_sequences_of_rows_and_several_inputs_go_together(opened):
    rows = [np.full((number % 4, 2), float(number)) for number in range(20)]
    part = opened({"x": {"jets": rows, "tokens": SEQUENCES, "age": AGES}, "y": LABELS}, validation=0.25).train
    assert part.shape == {"jets": (3, 2), "tokens": (3,), "age": (1,)}
    whole, _ = part.take(torch.arange(len(part)))
    assert set(whole) == {"jets", "tokens", "age", "jets_lengths", "tokens_lengths"}
    for at, age in enumerate((whole["age"][:, 0] * 19).round().int().tolist()):
        assert whole["jets_lengths"][at] == age % 4
        assert (whole["jets"][at, : age % 4] == age).all()
        assert (whole["jets"][at, age % 4 :] == 0).all()
        assert whole["tokens"][at, : age % 3 + 1].tolist() == SEQUENCES[age]


@pytest.mark.parametrize("y", [np.float64(1.5), 1])
def test_items_are_dicts_tuples_and_sequences(opened, y):
    targets = [y * (number % 2) for number in range(12)]
    images = torch.rand(12, 3, 2, 2)
    named = [
        {"image": image, "age": 0.5 * at, "label": y}
        for at, (image, y) in enumerate(zip(images, targets, strict=True))
    ]
    for items in (named, [({"image": one["image"], "age": one["age"]}, one["label"]) for one in named]):
        found = opened(Items(items), validation=0)
        seen, labels = found.train.take(torch.tensor([7]))
        assert torch.equal(seen["image"], images[7:8])
        assert seen["age"].item() == 3.5
        assert labels.item() == targets[7]
    found = opened(Items([((images[at], at), targets[at]) for at in range(12)]), validation=0)
    assert found.train.take(torch.tensor([5]))[0][1].item() == 5
    found = opened(Items([(SEQUENCES[at], targets[at]) for at in range(12)]), validation=0)
    assert found.train.take(torch.tensor([5]))[0][0].tolist() == [SEQUENCES[5]]


def test_a_part_of_a_pool_has_the_columns_of_its_rows():
    data = ({"pixels": PIXELS, "tokens": SEQUENCES}, LABELS)

    def program(comm: Communicator) -> tuple[SamplePool, DataSet]:
        pool = open_pool(data, comm)
        return pool, pool.divided(comm, 0.25, 0)

    pool, found = VirtualWorld(2).run(program)[1]
    part = found.train
    seen, targets = part.take(torch.arange(len(part)))
    assert torch.equal(targets, torch.from_numpy(LABELS)[part.rows])
    kept = [SEQUENCES[row] for row in part.rows]
    assert [
        row[:length].tolist() for row, length in zip(seen["tokens"], seen["lengths"], strict=True)
    ] == kept
    own = torch.from_numpy(PIXELS)[part.rows].double() / 255
    scaled = (own - own.mean()) / own.std(correction=0)
    torch.testing.assert_close(seen["pixels"][:, 0], scaled.float())
    outline = SamplePool.outline(read_source(data, {}))
    assert outline.dataset.fingerprint == pool.dataset.fingerprint
    others = copy.deepcopy(SEQUENCES)
    others[-1][-1] += 1
    other = SamplePool.outline(read_source(({"pixels": PIXELS, "tokens": others}, LABELS), {}))
    assert other.dataset.fingerprint != outline.dataset.fingerprint


def test_a_stretch_is_of_the_samples_alone():
    spans = torch.tensor([[4, 2], [0, 1], [1, 3]])
    part = Part(Columns((Column(spans, torch.arange(6), 3),)), torch.arange(3))
    (padded, lengths), _ = part.stretch(slice(0, 2)).take(torch.arange(2))
    assert (padded.tolist(), lengths.tolist()) == ([[4, 5], [0, 0]], [2, 1])
    assert len(part.stretch(slice(0, 2)).stored_inputs.columns[0].values) == 3


def test_missing_values_of_one_input_leave_the_sample_out_of_all(opened, capfd):
    ages, rows = AGES.copy(), [np.ones(number % 3 + 1) for number in range(20)]
    ages[4] = rows[7][-1] = np.nan
    data = {"x": {"age": ages, "rows": rows}, "y": AGES}
    found = opened(data, validation=0, options={"missing": "drop"})
    kept = np.delete(AGES, [4, 7])
    assert found.train.targets.tolist() == pytest.approx(kept.tolist())
    assert found.train.take(torch.arange(18))[0]["age"][:, 0].tolist() == pytest.approx(kept.tolist())
    assert "2 of 20 train samples have missing values" in capfd.readouterr().err


def test_other_data_have_the_columns_of_those_that_were_trained_on(opened):
    trained = opened({"x": {"tokens": SEQUENCES, "pixels": PIXELS}, "y": LABELS}, validation=0)
    dark = {"x": {"pixels": PIXELS[:8] // 2, "tokens": np.ones((8, 2), int)}, "y": LABELS[:8]}
    seen = seen_as(opened(dark, validation=0), trained_on(trained)).train
    assert seen.shape == trained.shape
    inputs, _ = seen.take(torch.arange(8))
    assert inputs["lengths"].tolist() == [2] * 8
    scale = trained.train.scale.each[1]
    assert torch.equal(inputs["pixels"], scale.apply(torch.from_numpy(PIXELS[:8, None] // 2)))


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (({"a": AGES, "b": AGES[:7]}, LABELS), r"7 inputs 'b' but 20 targets"),
        (((AGES, SEQUENCES[:5]), LABELS), r"5 inputs 1 but 20 targets"),
        (({"lengths": AGES}, LABELS), "the inputs are called 'lengths'"),
        (({"a b": AGES}, LABELS), "the inputs are called 'a b'"),
        (({"a": np.array(["x"] * 20)}, LABELS), "the train inputs 'a' are of type"),
        (([[[1], [2]], [[1, 2]]] * 10, LABELS), r"shape \(1, 2\) in sample 1 and \(2, 1\) in the first"),
        (
            {"x_train": {"a": AGES}, "y_train": LABELS, "x_test": {"b": AGES}, "y_test": LABELS},
            "the test part has the inputs b, and the train part a",
        ),
        (
            Items([({"a": 1}, 0), ({"b": 1}, 1)]),
            "item 1 of the train part has the inputs b, and item 0 the inputs a",
        ),
        (Items([{"a": 1}, {"a": 2}]), "a dict of a; it needs inputs and one entry that is called 'target'"),
    ],
)
def test_inputs_that_do_not_fit_together_are_refused(opened, data, found):
    with pytest.raises(BadData, match=found):
        opened(data, validation=0)
