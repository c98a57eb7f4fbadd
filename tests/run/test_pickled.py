"""Objects that go to the ranks: their large arrays lie in a file that each rank maps."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tutti
from tutti.comm.shm.memfd import FileAddress
from tutti.run.pickled import LARGE, Pickled
from tutti.run.pickled_arguments import by_name

ARRAY = np.arange(LARGE // 4, dtype=np.float64)
MIB = 1 << 20


def _numbers(value: Any) -> object:
    """Return what tells two values apart."""
    if isinstance(value, torch.Tensor):
        return value.dtype, _numbers(value.view(torch.uint8).numpy())
    if isinstance(value, np.ndarray):
        return value.dtype, value.shape, value.tobytes()
    return list(map(_numbers, value)) if isinstance(value, tuple) else value


@pytest.mark.parametrize(
    "value",
    [
        ARRAY,
        ARRAY.reshape(4, -1).T,
        ARRAY.reshape(4, -1)[:, ::2],
        torch.from_numpy(ARRAY),
        (ARRAY[: LARGE // 8], torch.from_numpy(ARRAY).half()),
        ["text", [0.5]] * (LARGE // 8),
    ],
)
def test_objects_come_back_as_they_were_also_from_other_hosts(value: Any) -> None:
    _, objects = by_name({"data": value})
    sent = pickle.loads(pickle.dumps(objects["data"]))
    for one in (sent, pickle.loads(pickle.dumps(sent.in_band()))):
        assert _numbers(one.load()) == _numbers(value)


def test_memory_is_freed_once_nothing_uses_it() -> None:
    given = Pickled.of(ARRAY)
    assert isinstance(given.held, FileAddress)
    file = f"/proc/self/fd/{given.held.descriptor}"
    kept = given.load()
    given.free()
    assert np.array_equal(kept, ARRAY)
    del kept
    given.free()
    assert os.stat(file).st_blocks == 0
    with pytest.raises(ValueError, match="greater than file size"):
        given.load()
    del given
    assert not os.path.lexists(file)


class Memory(tutti.Callback):
    """Notes the private memory of each rank and of the caller, and the caller's shared memory, in MiB."""

    def __init__(self, notes: Path) -> None:
        self.notes, self.caller = notes, os.getpid()

    def step(self, course: tutti.Course) -> None:
        files = Path(f"/proc/{self.caller}/fd").iterdir()
        objects = [one for one in files if os.readlink(one).startswith("/memfd:tutti-objects")]
        held = sum(one.stat().st_blocks for one in objects) * 512 // MIB
        found = {"rank": _private("self"), "caller": _private(self.caller), "held": held}
        (self.notes / f"{course.rank}").write_text(repr(found))


def _private(process: int | str) -> int:
    """Return the memory of a process that is no file's and that it shares with nobody, in MiB."""
    lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) // 1024 for line in lines if line.startswith("Pss_Anon:"))


def test_arrays_are_in_the_memory_of_a_host_once(tmp_path: Path) -> None:
    mib, seen = 200, []  # A block that is freed after it was copied stays in the heap: 64 MiB at most.
    large = np.ones((mib * MIB // 4096, 1024), np.float32)
    for inputs in (large[:64], large):
        data = inputs, np.arange(len(inputs)) % 2
        tutti.train("mlp", data, workers=2, steps=1, quiet=True, callbacks=[Memory(tmp_path)])
        first, second = (eval((tmp_path / rank).read_text()) for rank in "01")
        assert first["held"] == 0
        seen.append((first["rank"], second["rank"], first["caller"]))
    for small, with_data in zip(*seen, strict=True):
        assert with_data < small + mib // 2
