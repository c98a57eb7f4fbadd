"""Training data in files: the same samples as in memory, in an order that is the same at any world size."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.states import saved_by
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import Batches, DataSet, Queue, Scale, open_data, open_pool
from tutti.data.formats.npy import Mapped
from tutti.data.streaming import StreamedPart, Windows, decided
from tutti.errors import BadData, BadOption
from tutti.records.splits import Split, write_splits

SMALL = {"stream": True, "buffer": 0.002}
"""Windows of 62 samples of 16 bytes."""


@pytest.fixture
def streamed() -> Callable[..., DataSet]:
    """Opens a folder on a world of one, with a small buffer."""

    def opened(folder: Path, **options: object) -> DataSet:
        validation = options.pop("validation", 0)
        return VirtualWorld(ranks=1).run(
            lambda comm: open_data(str(folder), comm, validation, options={**SMALL, **options})
        )[0]

    return opened


def raw_of(folder: Path) -> np.ndarray:
    return np.concatenate([np.load(file) for file in sorted(folder.glob("x_train*"))])


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 120), st.integers(1, 30), st.integers(1, 120), st.integers(0, 3))
def test_each_epoch_has_every_sample_once(samples: int, block: int, window: int, epoch: int) -> None:
    order = Windows(samples, block, window).order(1, epoch)
    assert sorted(order.tolist()) == list(range(samples))


def test_an_order_depends_on_seed_and_epoch_and_a_window_has_few_blocks() -> None:
    windows = Windows(500, 10, 50)
    first, again, later, other = (windows.order(*of) for of in ((1, 0), (1, 0), (1, 1), (2, 0)))
    assert torch.equal(first, again)
    assert not torch.equal(first, later)
    assert not torch.equal(first, other)
    assert {len((window // 10).unique()) for window in first.split(50)} == {5}


def test_windows_fit_into_half_of_the_buffer_and_have_many_blocks() -> None:
    windows = Windows.of(samples=1_000_000, sample_bytes=784, buffer_bytes=4_000_000)
    assert windows.window * 784 <= 2_000_000
    assert windows.window // windows.block >= 32
    assert Windows.of(100, 784, 10**9).window == 100


def test_the_window_in_use_and_the_next_one_are_read_ahead(
    shards: Path, streamed: Callable[..., DataSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = streamed(shards, validation=0.2).train
    ahead: set[int] = set()
    monkeypatch.setattr(Mapped, "read_ahead", lambda files, start, stop: ahead.update(range(start, stop)))
    monkeypatch.setattr("tutti.data.streaming.threading.Thread.start", lambda thread: thread.run())
    for epoch in (0, 1):
        ahead.clear()
        order = part.order(5, epoch)
        for number, (_, (batch,)) in enumerate(Batches(part, 12, seed=5).epoch(epoch)):
            assert {*part.rows[batch.samples].tolist()} <= ahead
            assert {*part.rows[order[: 62 * (number * 12 // 62 + 2)]].tolist()} <= ahead


@pytest.mark.parametrize("own", [False, True])
def test_every_update_is_the_same_at_any_world_size_and_has_the_samples_of_the_files(
    shards: Path, own: bool
) -> None:
    def walk(comm: object) -> tuple[list[tuple[list[int], torch.Tensor]], Scale]:
        part = open_data(str(shards), comm, validation=0, options=SMALL).train
        batches = Batches(part, 12 // (comm.size if own else 1), comm.rank, comm.size, seed=5, own=own)
        return [(batch.samples.tolist(), batch.inputs) for _, (batch,) in batches.epoch(1)], part.scale

    raw, updates = raw_of(shards), []
    for ranks in (1, 2, 3):
        found = VirtualWorld(ranks=ranks).run(walk)
        updates.append(
            [[*chain(*(samples for samples, _ in one))] for one in zip(*(of for of, _ in found), strict=True)]
        )
        for batches, scale in found:
            for samples, inputs in batches:
                wanted = scale.apply(torch.from_numpy(raw[samples])[:, None])
                assert torch.equal(inputs, wanted)
    assert updates[0] == updates[1] == updates[2]
    assert sorted(chain(*updates[0])) == list(range(331))


@pytest.mark.parametrize("dtype", ["uint8", "float64", "int32", "channels last"])
def test_parts_are_those_of_memory_where_none_is_kept_aside(
    tmp_path: Path, streamed: Callable[..., DataSet], write: Callable[..., None], dtype: str
) -> None:
    if dtype == "channels last":
        tmp_path.joinpath("set").mkdir()
        x = np.random.default_rng(0).integers(0, 256, (50, 6, 5, 3), dtype=np.uint8)
        np.save(tmp_path / "set/x_train.npy", x)
        np.save(tmp_path / "set/y_train.npy", np.arange(50) % 2)
    else:
        write(tmp_path / "set", "train", [60, 60], dtype)
        write(tmp_path / "set", "test", [40], dtype, seed=1)
    here, there = (streamed(tmp_path / "set", stream=stream) for stream in (True, False))
    assert isinstance(here.train, StreamedPart)
    assert not isinstance(there.train, StreamedPart)
    assert (here.shape, here.train.scale) == (there.shape, there.train.scale)
    assert here.fingerprint == there.fingerprint
    for one, other in zip(here.parts, there.parts, strict=True):
        every = torch.arange(len(one))
        for mine, theirs in zip(one.take(every), other.take(every), strict=True):
            assert mine.dtype == theirs.dtype
            assert torch.equal(mine, theirs)


def test_stretches_of_neighbours_are_kept_aside_and_the_scale_is_that_of_the_others(shards: Path) -> None:
    (shards / "x_test.npy").unlink()
    (shards / "y_test.npy").unlink()

    def program(comm: object) -> DataSet:
        return open_pool(str(shards), comm, SMALL).divided(comm, 0.3, 0, test=0.2)

    (found,) = VirtualWorld(ranks=1).run(program)
    train, aside, tested = (part.rows.tolist() for part in found.parts)
    assert sorted(train + aside + tested) == list(range(331))
    assert len(tested) == round(0.2 * 331)
    assert len(aside) == round(0.3 * (331 - len(tested)))
    raw = raw_of(shards)[train] / 255.0
    assert found.train.scale.mean == pytest.approx((raw.mean(),))
    assert found.train.scale.std == pytest.approx((raw.std(),))


def test_a_fold_is_streamed_too(shards: Path, tmp_path: Path) -> None:
    held = np.arange(0, 331, 3)

    def program(comm: object) -> DataSet:
        pool = open_pool(str(shards), comm, SMALL)
        split = Split.of(np.setdiff1d(np.arange(331), held), held, 331, "split 0")
        write_splits(tmp_path / "splits.npz", [split], pool.dataset.fingerprint)
        return pool.divided(comm, 0, 0, (str(tmp_path / "splits.npz"), 0))

    (found,) = VirtualWorld(ranks=1).run(program)
    assert found.validation.rows.tolist() == held.tolist()
    seen, targets = found.validation.take(torch.arange(5))
    assert torch.equal(seen, found.train.scale.apply(torch.from_numpy(raw_of(shards)[held[:5]])[:, None]))
    assert targets.tolist() == (held[:5] % 5).tolist()


def test_an_order_is_gone_on_with_in_the_middle_bit_for_bit(
    shards: Path, streamed: Callable[..., DataSet]
) -> None:
    part = streamed(shards).train
    whole = [batch for _, (batch,) in Batches(part, 12, seed=5).epoch(1)]
    state = Batches(part, 12, seed=5).state(1, [13])
    other = Batches(streamed(shards).train, 12, seed=5)
    start = other.load_state(1, saved_by([state])[0])
    rest = [batch for _, (batch,) in other.epoch(1, start)]
    assert len(rest) == len(whole) - 13
    for mine, theirs in zip(rest, whole[13:], strict=True):
        assert torch.equal(mine.samples, theirs.samples)
        assert torch.equal(mine.inputs, theirs.inputs)


def test_batches_for_the_rank_that_asks_next_are_streamed_too(
    shards: Path, streamed: Callable[..., DataSet]
) -> None:
    part, tickets = streamed(shards).train, iter(range(1000))
    queue = Queue(Batches(part, 12, seed=5, own=True), lambda count: next(tickets) if count else 0)
    found = [sample for _, (batch,) in queue.epoch(0) for sample in batch.samples.tolist()]
    assert sorted(found) == list(range(331))


def test_a_stretch_is_pickled_without_its_samples(shards: Path, streamed: Callable[..., DataSet]) -> None:
    part = streamed(shards, validation=0.1).train
    piece = part.stretch(slice(20, 150)).stretch(slice(10, 130))
    again = pickle.loads(pickle.dumps(piece))
    for mine, theirs in zip(again.take(torch.arange(120)), part.take(torch.arange(30, 150)), strict=True):
        assert torch.equal(mine, theirs)
    assert len(pickle.dumps(piece)) < 130 * 16 + 5000


def test_data_are_streamed_where_memory_does_not_hold_them(
    shards: Path, streamed: Callable[..., DataSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    for free, expected in ((1 << 30, False), (8000, True)):
        monkeypatch.setattr("tutti.data.sources.free_bytes", lambda free=free: free)
        assert isinstance(streamed(shards, stream="auto").train, StreamedPart) == expected


def test_data_that_memory_does_not_hold_are_refused_with_the_way_out(
    tmp_path: Path, streamed: Callable[..., DataSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "set.npz", x=np.zeros((100, 8), np.float32), y=np.arange(100) % 2)
    monkeypatch.setattr("tutti.data.opening.free_bytes", lambda: 1000)
    with pytest.raises(BadData, match="tutti data convert DATA NEW"):
        streamed(tmp_path / "set.npz", stream="auto")


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"stream": "yes"}, "--data.stream"),
        ({"buffer": 0}, "--data.buffer"),
        ({"missing": "mean"}, "--data.stream true"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    shards: Path, streamed: Callable[..., DataSet], options: dict[str, object], named: str
) -> None:
    with pytest.raises(BadOption, match=named):
        streamed(shards, **options)


def test_broken_files_and_other_formats_are_refused(
    shards: Path, tmp_path: Path, streamed: Callable[..., DataSet]
) -> None:
    np.savez(tmp_path / "set.npz", x=np.zeros((4, 2)), y=np.arange(4))
    with pytest.raises(BadOption, match=r"write one by: tutti data convert .*set.npz NEW"):
        streamed(tmp_path / "set.npz")
    file = shards / "x_train-00001-of-00003.npy"
    np.save(file, np.zeros((10, 4, 5), np.uint8))
    with pytest.raises(BadData, match=r"00001-of-00003.npy has samples of the shape \(4, 5\)"):
        streamed(shards)
    os.truncate(file, 100)
    with pytest.raises(BadData, match=r"x_train-00001-of-00003.npy"):
        streamed(shards)
    file.unlink()
    with pytest.raises(BadData, match=r"x_train-00002-of-00003.npy"):
        streamed(shards)


def test_data_are_streamed_again_or_not_as_decided_before(shards: Path, tmp_path: Path) -> None:
    assert decided(str(shards), streamed=True) == {"stream": True}
    assert decided(str(shards), streamed=False) == {"stream": False}
    assert decided("s3://bucket/folder", streamed=False) == {"stream": False}
    assert decided(str(tmp_path), streamed=False) == decided("digits", streamed=False) == {}
