"""A run over files whose ranks are killed reads them on where it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tutti
from tests.run.test_survival import INPUTS, OPTIONS, TARGETS, UPDATES, Killed, model, weights_of
from tutti.records.run_folder import RunFolder


def hdf5_list(folder: Path) -> dict[str, Any]:
    """Files of unequal lengths, and a list of them."""
    h5py = pytest.importorskip("h5py", reason="needs the extra 'data'")
    files = [folder / f"{number}.h5" for number in range(3)]
    for path, rows in zip(files, (slice(0, 25), slice(25, 32), slice(32, 60)), strict=True):
        with h5py.File(path, "w") as file:
            file["features"], file["labels"] = INPUTS[rows].numpy(), TARGETS[rows].numpy()
    (folder / "list.txt").write_text("\n".join(map(str, files)))
    return {"data": str(folder / "list.txt")}


def streamed(folder: Path) -> dict[str, Any]:
    """A folder of NPY files that is read window by window."""
    np.save(folder / "x_train.npy", INPUTS.numpy())
    np.save(folder / "y_train.npy", TARGETS.numpy())
    return {"data": str(folder), "data_options": {"stream": True, "buffer": 1}}


@pytest.mark.parametrize("files", [hdf5_list, streamed])
def test_new_ranks_read_on_in_the_files(tmp_path: Path, files: Callable[[Path], dict[str, Any]]) -> None:
    data, notes = tmp_path / "data", tmp_path / "notes"
    data.mkdir()
    notes.mkdir()
    options = {**OPTIONS, **files(data), "workers": 2}
    alone = tutti.train(model(), **options)
    killed = Killed(notes, [(1, 3), (0, 2 * UPDATES + 1), (1, 3 * UPDATES)])
    options |= {"on_failure": "respawn", "out": str(tmp_path / "run")}
    survived = tutti.train(model(), callbacks=killed, **options)
    assert len(list(notes.iterdir())) == 3
    assert torch.equal(weights_of(survived), weights_of(alone))
    assert [one.train for one in survived.history] == [one.train for one in alone.history]
    starts = [one.step for one in RunFolder(tmp_path / "run").starts().records]
    assert len(starts) == 4
    assert min(starts[1:]) > 0  # They began from a copy of the state.
