"""A part that holds rows of the memory is like one that holds these samples alone, and copies nothing."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from tutti.comm.virtual.world import VirtualWorld
from tutti.data import Batches, DataSet, Part, Queue, SamplePool, Scale, open_pool
from tutti.data.scale import pixel_scale
from tutti.data.sources import read_source
from tutti.errors import BadData
from tutti.records.splits import Split, read_split, write_splits
from tutti.training.evaluation import Objective, evaluate
from tutti.training.losses import LOSSES

RANDOM = torch.Generator().manual_seed(0)
STORED = torch.randint(0, 256, (40, 3, 2, 5), generator=RANDOM, dtype=torch.uint8)
TARGETS = torch.arange(40) % 4
ROWS = torch.tensor([0, 3, 4, 7, 8, 9, 15, 21, 22, 23, 30, 38, 39])
SCALE = Scale((0.1, 0.2, 0.3), (0.5, 0.25, 1.0))
SOME = Part(STORED, TARGETS, SCALE, ROWS)
ALONE = Part(STORED[ROWS], TARGETS[ROWS], SCALE)


def test_rows_are_seen_as_if_there_was_nothing_else():
    assert len(SOME) == 13
    assert SOME.shape == (3, 2, 5)
    assert torch.equal(SOME.inputs, ALONE.inputs)
    assert torch.equal(SOME.targets, ALONE.targets)
    for found, wanted in zip(
        SOME.take(torch.tensor([12, 0, 5])), ALONE.take(torch.tensor([12, 0, 5])), strict=True
    ):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("part", [SOME, ALONE])
def test_a_stretch_is_pickled_without_the_rest(part):
    whole = replace(part, stored_inputs=STORED.repeat(50, 1, 1, 1), stored_targets=TARGETS.repeat(50))
    pickled = pickle.dumps(whole.stretch(slice(2, 6)))
    assert len(pickled) < 5_000 < whole.stored_inputs.nbytes
    found, wanted = pickle.loads(pickled), whole.take(torch.arange(2, 6))
    for one, other in zip(found.take(torch.arange(4)), wanted, strict=True):
        assert torch.equal(one, other)


def batches_of(part, comm, own, queue):
    dealt = Batches(part, 4, comm.rank, comm.size, seed=3, own=own)
    dealt = Queue(dealt, comm.counter().add) if queue else dealt
    return [(b.inputs, b.targets, b.samples, b.share) for _, batches in dealt.epoch(0) for b in batches]


@pytest.mark.parametrize(("own", "queue"), [(False, False), (True, False), (True, True)])
def test_batches_of_rows_are_those_of_the_samples_alone(own, queue):
    of_rows, wanted = (
        VirtualWorld(3).run(lambda comm, part=part: batches_of(part, comm, own, queue))
        for part in (SOME, ALONE)
    )
    assert sum(len(batches) for batches in of_rows)
    assert all(
        torch.equal(torch.as_tensor(a), torch.as_tensor(b))
        for ours, theirs in zip(of_rows, wanted, strict=True)
        for one, other in zip(ours, theirs, strict=True)
        for a, b in zip(one, other, strict=True)
    )


def test_rows_are_evaluated_once_each_and_no_others():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Flatten(), nn.Linear(30, 4))
    objective = Objective(LOSSES["cross_entropy"], (), 4)
    of_rows, wanted = (
        VirtualWorld(3).run(
            lambda comm, part=part: evaluate(module, part, comm, objective, batch_size=3).total(comm)
        )[0]
        for part in (SOME, ALONE)
    )
    assert of_rows == wanted
    assert of_rows.samples == 13


def test_memory_that_parts_share_is_copied_to_a_device_once():
    data = DataSet("some", SOME, replace(SOME, rows=ROWS[:2]), None, 4, ())
    assert data.nbytes == STORED.nbytes + TARGETS.nbytes
    moved = data.on("meta")
    assert moved.train.stored_inputs is moved.validation.stored_inputs
    assert moved.nbytes == data.nbytes
    assert moved.train.rows.device.type == "meta"
    assert len(moved.validation) == 2


# --- pools


def pooled(data, ranks=1, ranks_per_host=None, **arguments):
    def program(comm):
        pool = open_pool(data, comm)
        return pool.divided(comm, **{"validation": 0.2, "seed": 5, **arguments}), pool

    return VirtualWorld(ranks, ranks_per_host=ranks_per_host or ranks).run(program)


def test_ranks_of_a_host_see_one_copy_in_memory_of_anybody(images):
    sets = pooled(images, ranks=4, ranks_per_host=2)
    places = [data.train.stored_inputs.data_ptr() for data, _ in sets]
    assert places[0] == places[1] != places[2] == places[3]
    contents = read_source(images, {})
    outline = pickle.loads(pickle.dumps(SamplePool.outline(contents)))
    memory = torch.zeros(outline.nbytes, dtype=torch.uint8)
    outline.laid(memory).fill(contents)
    again = outline.laid(memory)  # what another process does that maps it
    pool = sets[0][1]
    assert again.dataset.fingerprint == pool.dataset.fingerprint
    for one, other in zip(again.dataset.train.tensors(), pool.dataset.train.tensors(), strict=True):
        assert torch.equal(one, other)


def test_a_validation_part_of_the_source_is_kept(images):
    x, y = images
    data = {"x_train": x[:40], "y_train": y[:40], "x_val": x[40:], "y_val": y[40:]}
    ours, _ = pooled(data)[0]
    assert (len(ours.train), len(ours.validation)) == (40, 20)
    assert ours.validation.rows is None


# --- splits


@pytest.fixture
def splits(tmp_path, images):
    """A file with two splits of `images`, the second of which trains on some samples twice."""
    outline = SamplePool.outline(read_source(images, {}))
    held = np.arange(0, 60, 3)
    found = [
        Split.of(np.setdiff1d(np.arange(60), held), held[::-1], 60, "split 0"),
        Split.of([7, 1, 1, 5], [0, 2], 60, "split 1"),
    ]
    write_splits(tmp_path / "splits.npz", found, outline.dataset.fingerprint)
    return tmp_path / "splits.npz"


def test_the_scale_of_a_split_is_exactly_that_of_its_training_rows(images, splits):
    x, y = images
    for number in (0, 1):
        for ours, _ in pooled(images, ranks=3, place=(str(splits), number)):
            rows = ours.train.rows.numpy()
            scale = pixel_scale(x.__getitem__, rows)
            assert ours.train.scale == ours.validation.scale == scale
            assert ours.train.targets.tolist() == y[rows].tolist()
            assert ours.test is None
    assert ours.train.rows.tolist() == [1, 1, 5, 7]
    assert ours.validation.rows.tolist() == [0, 2]


def test_the_parts_of_the_source_but_for_training_are_left_for_later(images, splits):
    x, y = images
    data = {"x": x, "y": y, "x_val": x[:9], "y_val": y[:9], "x_test": x[:5], "y_test": y[:5]}
    ours, _ = pooled(data, place=(str(splits), 0))[0]
    assert (len(ours.train), len(ours.validation), ours.test) == (40, 20, None)


def test_the_same_splits_make_the_same_file(tmp_path, splits):
    fingerprint = str(np.load(splits)["fingerprint"])
    found = [read_split(splits, number, 60, fingerprint) for number in (0, 1)]
    write_splits(tmp_path / "again.npz", found, fingerprint)
    assert (tmp_path / "again.npz").read_bytes() == splits.read_bytes()


def test_a_fingerprint_depends_on_no_type_of_floats(images):
    x, y = images[0] / 3.0, images[1] * 0.7
    known = SamplePool.outline(read_source((x, y), {})).dataset.fingerprint
    torch.set_default_dtype(torch.float64)
    try:
        assert SamplePool.outline(read_source((x, y), {})).dataset.fingerprint == known
    finally:
        torch.set_default_dtype(torch.float32)
    assert SamplePool.outline(read_source((x + 1e-3, y), {})).dataset.fingerprint != known
    assert SamplePool.outline(read_source((x, y[::-1]), {})).dataset.fingerprint != known


def message(data, place, ranks=4, ranks_per_host=2):
    def program(comm):
        with pytest.raises(BadData) as caught:
            open_pool(data, comm).divided(comm, 0.1, 0, place(comm) if callable(place) else place)
        return str(caught.value)

    (said,) = set(VirtualWorld(ranks, ranks_per_host=ranks_per_host).run(program))
    return said


def test_every_rank_says_what_is_wrong_with_a_split(images, splits, tmp_path):
    x, y = images
    assert "has no split 7; they are numbered from 0" in message(images, (str(splits), 7))
    assert "are of other data; give the data" in message((x, np.roll(y, 1)), (str(splits), 0))
    assert "cannot be read" in message(images, (str(tmp_path / "none.npz"), 0))
    np.savez(tmp_path / "data.npz", x=x)
    assert "so it is no file of splits" in message(images, (str(tmp_path / "data.npz"), 0))
    np.savez(tmp_path / "other.npz", **{**np.load(splits), "test-0": np.arange(0, 57, 3)})

    def differing(comm):
        return (str(splits) if comm.rank < 2 else str(tmp_path / "other.npz")), 0

    assert "the hosts read different splits: rank 2" in message(images, differing)


@pytest.mark.parametrize(
    ("train", "test", "said"),
    [
        ([1, 2], [2, 3], r"split 0 has 1 samples in both parts, the first of them 2"),
        ([], [1], r"the train part of split 0 has the shape \(0,\)"),
        ([1], [], r"the test part of split 0 has the shape \(0,\)"),
        ([1, 10], [2], "has sample 10, and the data have 10 samples"),
        ([1], [-1], r"has sample -1, and"),
        ([1], [2, 2], "has sample 2 twice"),
        ([True] * 10, [2], "type bool; give the numbers of its samples"),
        ([1.0], [2], "type float64"),
        ([[1]], [2], r"shape \(1, 1\)"),
    ],
)
def test_a_split_that_cannot_be_used_is_refused(train, test, said):
    with pytest.raises(BadData, match=said):
        Split.of(train, test, 10, "split 0")


def test_a_split_of_another_kind_is_refused_in_a_file_too(tmp_path):
    np.savez(
        tmp_path / "a.npz",
        **{"train-0": np.array([1, 2]), "test-0": np.array([2]), "fingerprint": np.array("f")},
    )
    with pytest.raises(BadData, match=r"split 0 of .*a\.npz has 1 samples in both parts"):
        read_split(tmp_path / "a.npz", 0, 10, "f")
    pickled = np.array([{}], dtype=object)
    np.savez(tmp_path / "b.npz", **{"train-0": pickled, "test-0": pickled, "fingerprint": np.array("f")})
    with pytest.raises(BadData, match="Python objects"):
        read_split(tmp_path / "b.npz", 0, 10, "f")
