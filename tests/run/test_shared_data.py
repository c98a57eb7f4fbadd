"""Data sets in memory that outlives the ranks that have read them."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.farm import misbehaving
from tutti.checkpoint.memory_files import StateMemory
from tutti.comm.shm.arena import Arena
from tutti.comm.shm.communicator import HostCommunicator
from tutti.comm.shm.memfd import FileAddress
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import DataSet
from tutti.errors import BadData
from tutti.run import train
from tutti.run.build import open_config_data
from tutti.run.config import TrainConfig
from tutti.run.jobs import Recipe
from tutti.run.shared_data import SharedData
from tutti.run.train_job import TrainJob

COUNTED = f"{misbehaving.__file__}:counted"


@pytest.fixture
def address() -> Iterator[FileAddress]:
    with closing(StateMemory()) as memory:
        yield memory.place.data


def opened(address: FileAddress, config: TrainConfig, *, one_run: bool = True) -> DataSet:
    """Open a data set as new ranks do."""
    with closing(HostCommunicator.alone()) as comm:
        return SharedData(address, one_run=one_run).open(Recipe(config), comm)


@pytest.mark.parametrize("one_run", [True, False])
def test_later_ranks_find_what_earlier_ones_have_read(
    address: FileAddress, tmp_path: Path, one_run: bool
) -> None:
    config = TrainConfig(data=COUNTED, data_options={"folder": str(tmp_path)}, validation=0.25)
    numbers, found = [], []
    for _ in range(2):
        random.seed(5)
        torch.manual_seed(5)
        found.append(opened(address, config, one_run=one_run))
        numbers.append((random.random(), torch.rand(1)))
    assert (tmp_path / "reads").read_text() == "read\n"
    assert numbers[0] == numbers[1]
    for first, second in zip(found[0].parts, found[1].parts, strict=True):
        assert torch.equal(first.inputs, second.inputs)
        assert torch.equal(first.targets, second.targets)
        first.stored_targets[0] = 7
        assert second.stored_targets[0] == 7


def streamed(folder: Path) -> TrainConfig:
    for name, width in (("inputs", 64), ("targets", 2)):
        np.save(folder / f"{name}.npy", np.arange(64.0).reshape(64, 1) % width)
    return TrainConfig(data=str(folder), data_options={"stream": True})


def table(folder: Path, names: str = "size,town,born,label", towns: str = "12,34,5x") -> TrainConfig:
    rows = [
        {"size": n % 7, "town": towns.split(",")[n % 3], "born": f"19{n + 10}-01-02", "label": "ab"[n % 2]}
        for n in range(64)
    ]
    lines = [names, *(",".join(str(row[name]) for name in names.split(",")) for row in rows)]
    path = folder / f"{names}.csv"
    path.write_text("\n".join(lines))
    return TrainConfig(data=str(path), data_options={"target": "label"})


@pytest.mark.parametrize("kind", [streamed, table])
def test_every_kind_of_data_is_found_as_it_was_prepared(
    address: FileAddress, tmp_path: Path, kind: Callable[[Path], TrainConfig]
) -> None:
    config = kind(tmp_path)
    first, second = opened(address, config), opened(address, config)
    rows = torch.arange(8)
    for one, other in zip(first.train.take(rows), second.train.take(rows), strict=True):
        assert torch.equal(one, other)


def test_a_table_is_read_as_the_weights_expect_that_a_run_begins_with(
    address: FileAddress, tmp_path: Path
) -> None:
    fields = {"model": "mlp", "model_options": {"hidden": [4]}, "steps": 1, "out": str(tmp_path / "run")}
    job = TrainJob(table(tmp_path).changed(fields), quiet=True)
    VirtualWorld(1).run(lambda comm: train.work(comm, pickle.dumps(job)))
    other = table(tmp_path, "label,born,town,size", "12,34,56").changed({"weights": str(tmp_path / "run")})
    opened(address, other.changed({"weights": None}))  # read otherwise, beside it
    kept, rows = opened(address, other), torch.arange(8)
    with closing(HostCommunicator.alone()) as comm:
        read = open_config_data(Recipe(other), comm)
    assert torch.equal(kept.train.take(rows)[0], read.train.take(rows)[0])
    assert kept.shape == read.shape == opened(address, job.config).shape


def test_what_a_reader_left_that_died_is_freed(address: FileAddress, tmp_path: Path) -> None:
    opened(address, TrainConfig(data="digits"))
    arena = Arena.open(address)
    left = arena.words(arena.allocate(8), 1)
    left[0] = 1
    with pytest.raises(BadData):
        opened(address, TrainConfig(data=str(tmp_path)))
    assert left[0] == 0
    assert len(opened(address, TrainConfig(data="digits")).train) > 1000
