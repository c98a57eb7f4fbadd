"""Training data in files: the same samples as in memory, in an order that is the same at any world size."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.states import saved_by
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import Batches, DataSet, Queue, open_data, open_pool
from tutti.data.streaming.options import decided
from tutti.data.streaming.part import StreamedPart
from tutti.data.streaming.windows import WindowOrder
from tutti.errors import BadData, BadOption
from tutti.run.config import TrainConfig
from tutti.state import State
from tutti.studies.cross_validation.samples import samples_of
from tutti.studies.cross_validation.samples_job import SamplesJob

SMALL = {"stream": True, "buffer": 0.002}
"""Windows of 62 samples of 16 bytes."""


@pytest.fixture
def streamed() -> Callable[..., DataSet]:
    """Opens a folder on a world of one, with a small buffer."""

    def opened(folder: Path, **options: object) -> DataSet:
        arguments = {"validation": options.pop("validation", 0.1)}
        options = {**SMALL, **options}
        return VirtualWorld(ranks=1).run(
            lambda comm: open_data(str(folder), comm, options=options, **arguments)
        )[0]

    return opened


def epochs(folder: Path, ranks: int, count: int = 2) -> list[list[list[tuple[list[int], torch.Tensor]]]]:
    """Return what each rank gets in some epochs, update by update."""

    def walk(comm: object) -> list[list[tuple[list[int], torch.Tensor]]]:
        part = open_data(str(folder), comm, validation=0, options=SMALL).train
        batches = Batches(part, 12, comm.rank, comm.size, seed=5)
        return [
            [(batch.samples.tolist(), batch.inputs) for _, (batch,) in batches.epoch(epoch)]
            for epoch in range(count)
        ]

    return VirtualWorld(ranks=ranks).run(walk)


def test_an_epoch_goes_through_its_windows_and_says_so_that_they_are_read_ahead(
    shards: Path, streamed: Callable[..., DataSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = streamed(shards, validation=0).train
    assert isinstance(part, StreamedPart)
    entered, enter = [], StreamedPart.enter

    def noted(part: StreamedPart, order: WindowOrder, samples: torch.Tensor) -> None:
        entered.append((order, samples))
        enter(part, order, samples)

    monkeypatch.setattr(StreamedPart, "enter", noted)
    batches = Batches(part, 12, seed=5)
    for epoch in (0, 1):
        entered.clear()
        wanted = part.windows.order(5, epoch)[:]
        taken = [batch.samples for _, (batch,) in batches.epoch(epoch)]
        assert torch.equal(torch.cat(taken), wanted)
        assert torch.equal(torch.cat([samples for _, samples in entered]), wanted)
        for order, _ in entered:
            assert torch.equal(order[:], wanted)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_sample_is_there_once_in_an_epoch_whatever_the_ranks(shards: Path, ranks: int) -> None:
    for epoch in zip(*epochs(shards, ranks), strict=True):
        assert sorted(sample for rank in epoch for samples, _ in rank for sample in samples) == list(
            range(331)
        )


def test_each_update_has_the_same_samples_at_every_world_size(shards: Path) -> None:
    def updates(ranks: int) -> list[list[int]]:
        epoch = zip(*(rank[1] for rank in epochs(shards, ranks)), strict=True)
        return [[sample for samples, _ in update for sample in samples] for update in epoch]

    assert updates(1) == updates(2) == updates(3)


def test_batches_from_windows_are_the_samples_of_the_files(shards: Path) -> None:
    raw = np.concatenate([np.load(file) for file in sorted(shards.glob("x_train*"))])
    for rank in epochs(shards, 2):
        for samples, inputs in (batch for epoch in rank for batch in epoch):
            numbers = torch.from_numpy(raw[samples]).float()[:, None]
            flat, seen = numbers.flatten(), inputs.flatten()
            slope = (seen.max() - seen.min()) / (flat.max() - flat.min())
            assert torch.allclose(seen - seen.min(), (flat - flat.min()) * slope, atol=1e-5)


def test_parts_are_those_of_memory_where_none_is_kept_aside(
    shards: Path, streamed: Callable[..., DataSet]
) -> None:
    here, there = streamed(shards, validation=0), streamed(shards, validation=0, stream=False)
    assert isinstance(here.train, StreamedPart)
    assert not isinstance(there.train, StreamedPart)
    assert here.train.fingerprint() == there.train.fingerprint()
    for one, other in zip(here.parts, there.parts, strict=True):
        every = torch.arange(len(one))
        for mine, theirs in zip(one.take(every), other.take(every), strict=True):
            assert torch.equal(mine, theirs)


def test_the_scale_is_that_of_the_samples_that_are_trained_on(
    shards: Path, streamed: Callable[..., DataSet]
) -> None:
    found = streamed(shards, validation=0.3)
    raw = np.concatenate([np.load(file) for file in sorted(shards.glob("x_train*"))]) / 255.0
    rows = found.train.source.spans.rows(np.arange(len(found.train)))
    assert found.train.scale.mean == pytest.approx((raw[rows].mean(),))
    assert found.train.scale.std == pytest.approx((raw[rows].std(),))


def test_floats_and_integers_are_kept_as_in_memory(tmp_path: Path, write: Callable[..., None]) -> None:
    for dtype, kept in (("float64", torch.float32), ("int32", torch.int64), ("float32", torch.float32)):
        write(tmp_path / dtype, "train", [60, 60], dtype)
        assert epochs(tmp_path / dtype, 1, count=1)[0][0][0][1].dtype == kept


def test_pictures_whose_channels_come_last_are_turned(
    tmp_path: Path, streamed: Callable[..., DataSet]
) -> None:
    tmp_path.joinpath("set").mkdir()
    x = np.random.default_rng(0).integers(0, 256, (50, 6, 5, 3), dtype=np.uint8)
    np.save(tmp_path / "set/x_train.npy", x)
    np.save(tmp_path / "set/y_train.npy", np.arange(50) % 2)
    here, there = (streamed(tmp_path / "set", validation=0, stream=stream) for stream in (True, False))
    assert here.shape == (3, 6, 5)
    assert here.train.scale == there.train.scale
    assert torch.equal(here.train.take(torch.arange(50))[0], there.train.take(torch.arange(50))[0])


def test_an_order_is_gone_on_with_in_the_middle_bit_for_bit(
    shards: Path, streamed: Callable[..., DataSet]
) -> None:
    part = streamed(shards, validation=0).train
    whole = [(batch.samples, batch.inputs) for _, (batch,) in Batches(part, 12, seed=5).epoch(1)]
    first = Batches(part, 12, seed=5)
    state = first.state(1, [13])
    other = Batches(streamed(shards, validation=0).train, 12, seed=5)
    start = other.load_state(1, saved_by([state])[0])
    rest = [(batch.samples, batch.inputs) for _, (batch,) in other.epoch(1, start)]
    assert len(rest) == len(whole) - 13
    for (mine, x), (theirs, y) in zip(rest, whole[13:], strict=True):
        assert torch.equal(mine, theirs)
        assert torch.equal(x, y)


@pytest.mark.parametrize("stream", [True, False])
def test_a_run_goes_on_with_its_order_where_memory_has_changed(
    shards: Path, streamed: Callable[..., DataSet], stream: bool
) -> None:
    before, after = (streamed(shards, validation=0, stream=one).train for one in (stream, not stream))
    began, goes_on = Batches(before, 12, seed=5), Batches(after, 12, seed=5)
    goes_on.load_state(0, saved_by([began.state(0, [3])])[0])
    for epoch in (0, 1):
        one, other = ([b.samples.tolist() for _, (b,) in of.epoch(epoch)] for of in (began, goes_on))
        assert one == other


def test_other_numbers_of_ranks_take_what_is_left(shards: Path, streamed: Callable[..., DataSet]) -> None:
    part = streamed(shards, validation=0).train
    crew = [Batches(part, 12, rank, 3, seed=5, own=True) for rank in range(3)]
    states: list[State] = [one.state(0, [4, 5, 4]) for one in crew]
    taken = [
        s
        for one, made in zip(crew, (4, 5, 4), strict=True)
        for _, (b,) in one.epoch(0, 0, made)
        for s in b.samples.tolist()
    ]
    left = Batches(part, 12, seed=5)
    start = left.load_state(0, saved_by(states, 1)[0])
    taken += [s for _, (b,) in left.epoch(0, start) for s in b.samples.tolist()]
    assert sorted(taken) == list(range(331))


def test_batches_for_whoever_asks_are_streamed_too(shards: Path, streamed: Callable[..., DataSet]) -> None:
    part, tickets = streamed(shards, validation=0).train, iter(range(1000))
    queue = Queue(Batches(part, 12, seed=5, own=True), lambda count: next(tickets) if count else 0)
    found = [sample for _, (batch,) in queue.epoch(0) for sample in batch.samples.tolist()]
    assert sorted(found) == list(range(331))


def test_a_part_is_pickled_without_its_samples(shards: Path, streamed: Callable[..., DataSet]) -> None:
    piece = streamed(shards, validation=0).train.stretch(slice(20, 150))
    again = pickle.loads(pickle.dumps(piece))
    assert torch.equal(again.take(torch.arange(130))[0], piece.take(torch.arange(130))[0])
    assert len(pickle.dumps(piece)) < 130 * 8 + 5000


def test_a_truncated_file_is_named(shards: Path, streamed: Callable[..., DataSet]) -> None:
    file = shards / "x_train-00001-of-00003.npy"
    os.truncate(file, 1000)
    with pytest.raises(BadData, match=r"x_train-00001-of-00003.npy"):
        streamed(shards)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (np.zeros((10, 4, 4), np.float32), r"00001-of-00003.npy .* type float32, .*00000-of-00003.npy"),
        (np.zeros((10, 4, 5), np.uint8), r"00001-of-00003.npy has samples of the shape \(4, 5\)"),
        (
            np.zeros((10, 4, 4), np.uint8),
            "210 inputs .* but 331 targets",
        ),
    ],
)
def test_a_file_that_does_not_fit_the_others_is_named(
    shards: Path, streamed: Callable[..., DataSet], other: np.ndarray, said: str
) -> None:
    np.save(shards / "x_train-00001-of-00003.npy", other)
    with pytest.raises(BadData, match=said):
        streamed(shards)


@pytest.mark.parametrize("stream", [True, False])
def test_a_missing_file_is_named(shards: Path, streamed: Callable[..., DataSet], stream: bool) -> None:
    (shards / "x_train-00001-of-00003.npy").unlink()
    with pytest.raises(BadData, match=r"2 of 3 files x_train-...; it needs number 00001"):
        streamed(shards, stream=stream)


def test_data_are_streamed_by_themselves_where_memory_does_not_hold_them(
    shards: Path, streamed: Callable[..., DataSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    for free, expected in ((1 << 30, False), (8000, True)):
        monkeypatch.setattr("tutti.data.streaming.options.free_bytes", lambda free=free: free)
        assert isinstance(streamed(shards, stream="auto").train, StreamedPart) == expected


def test_data_that_memory_does_not_hold_are_refused_with_the_way_out(
    tmp_path: Path, streamed: Callable[..., DataSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    np.savez(tmp_path / "set.npz", x=np.zeros((100, 8), np.float32), y=np.arange(100) % 2)
    monkeypatch.setattr("tutti.data.pool.free_bytes", lambda: 1000)
    with pytest.raises(BadData, match="tutti data convert DATA NEW"):
        streamed(tmp_path / "set.npz", stream="auto")


def test_runs_that_need_samples_by_number_refuse_to_stream(shards: Path) -> None:
    config = TrainConfig(model="mlp", data=str(shards), data_options={"stream": True})
    with pytest.raises(BadOption, match="not for runs that need samples by number"):
        samples_of(SamplesJob(config, (), 1))
    with pytest.raises(BadOption, match="not for runs that need samples by number"):
        VirtualWorld(ranks=1).run(lambda comm: open_pool(str(shards), comm, {"stream": True}))


def test_runs_that_need_samples_by_number_refuse_data_that_memory_does_not_hold(
    shards: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tutti.data.pool.free_bytes", lambda: 1000)
    with pytest.raises(BadData, match="of memory are free; give fewer samples"):
        VirtualWorld(ranks=1).run(lambda comm: open_pool(str(shards), comm))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stream": "yes"}, "--data.stream is 'yes'; give true, false or auto"),
        ({"buffer": 0}, "--data.buffer is 0; give the memory"),
        ({"missing": "mean"}, "--data.missing mean is not for data that are streamed"),
        ({"size": "4,4"}, "--data.size is no option of data that are streamed"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    shards: Path, streamed: Callable[..., DataSet], options: dict[str, object], said: str
) -> None:
    with pytest.raises(BadOption, match=said):
        streamed(shards, **options)


def test_data_are_streamed_again_or_not_whatever_memory_is_free_then(shards: Path, tmp_path: Path) -> None:
    assert decided(str(shards), streamed=True) == {"stream": True}
    assert decided(str(shards), streamed=False) == {"stream": False}
    assert decided("s3://bucket/folder", streamed=False) == {"stream": False}
    assert decided(str(tmp_path), streamed=False) == decided("digits", streamed=False) == {}


def test_other_files_are_to_be_converted_first(tmp_path: Path, streamed: Callable[..., DataSet]) -> None:
    np.savez(tmp_path / "set.npz", x=np.zeros((4, 2)), y=np.arange(4))
    with pytest.raises(BadOption, match=r"write one by: tutti data convert .*set.npz NEW"):
        streamed(tmp_path / "set.npz")
