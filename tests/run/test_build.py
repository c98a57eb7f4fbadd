"""Tests of how the parts of a run are built."""

from __future__ import annotations

from pathlib import Path

import torch

from tutti.data.parts import DataSet, Part
from tutti.run.build import build_model, seeded
from tutti.run.config import TrainConfig
from tutti.run.train_job import TrainJob

DRAWING = """
import torch

DRAWN = torch.rand(3)


def net(shape, outputs):
    return torch.nn.Linear(shape[0], outputs)
"""


def test_the_first_weights_do_not_depend_on_when_a_file_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "drawing.py"
    file.write_text(DRAWING)
    job = TrainJob(TrainConfig(model=f"{file}:net"))
    data = DataSet("two", Part(torch.zeros(2, 3), torch.tensor([0, 1])), None, None, 2, ())
    with seeded(0):
        first, again = (build_model(job, data).state_dict() for _ in range(2))
    assert torch.equal(first["weight"], again["weight"])
