"""Whole models as programs, which give what the model gives, for any number of samples."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tutti
from tests.run.test_predict import trained
from tutti.cli.main import main
from tutti.errors import BadModel
from tutti.exports.programs import PROGRAMS
from tutti.exports.programs.base import write_program

pytestmark = pytest.mark.usefixtures("nothing_beside")

IMAGES = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on pictures of three classes, in bf16 and with the channels last."""
    folder = tmp_path_factory.mktemp("run")
    names = np.array(["ant", "bee", "cow"])[np.arange(60) % 3]
    np.savez(folder / "i.npz", x=IMAGES, y=names)
    options = {"precision": "bf16", "layout": "channels_last", "model": "cnn", "model_options": {}}
    return trained(folder / "run", data=str(folder / "i.npz"), **options)


def test_programs_take_stored_inputs_and_give_the_outputs_of_the_model(run: Path, tmp_path: Path) -> None:
    import onnx
    import onnxruntime

    plain = tutti.load(run).plain()
    given = IMAGES.transpose(0, 3, 1, 2)
    with torch.no_grad():
        wanted = plain(torch.from_numpy(given.copy())).numpy()
    assert main(["export", str(run), "--to", "onnx", "--out", f"{tmp_path}/a.onnx"]) == 0
    session = onnxruntime.InferenceSession(f"{tmp_path}/a.onnx", providers=["CPUExecutionProvider"])
    found = session.run(None, {"inputs": given})[0]
    bound = 1e-5 * max(1, np.abs(wanted).max())
    assert np.abs(found - wanted).max() <= bound
    facts = {one.key: one.value for one in onnx.load(tmp_path / "a.onnx").metadata_props}
    assert json.loads(facts["labels"]) == ["ant", "bee", "cow"]

    assert main(["export", str(run), "--to", "torch-export", "--out", f"{tmp_path}/a.pt2"]) == 0
    extra = {"labels": ""}
    program = torch.export.load(tmp_path / "a.pt2", extra_files=extra).module()
    assert np.abs(program(torch.from_numpy(given.copy())).detach().numpy() - wanted).max() <= bound
    assert json.loads(extra["labels"]) == ["ant", "bee", "cow"]
    # The model itself computes in bf16, whose numbers have eight bits, in some layers of sums.
    itself = tutti.load(run).outputs(given)
    assert np.abs(itself - wanted).max() <= 0.1 * np.abs(wanted).max()


class Own(nn.Module):
    """A model that looks at its inputs, or at random numbers."""

    def __init__(self, random: bool) -> None:
        super().__init__()
        self.random = random

    def example(self, samples: int) -> Tensor:
        return torch.ones(samples, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.random:
            return inputs + torch.rand(3)
        return inputs * 2 if inputs.sum() > 0 else inputs


@pytest.mark.parametrize(
    ("random", "said"), [(True, "gives outputs that are off by"), (False, "cannot be written as")]
)
def test_what_computes_something_else_is_refused_and_nothing_is_left(
    tmp_path: Path, random: bool, said: str
) -> None:
    with pytest.raises(BadModel, match=said):
        write_program(tmp_path / "a.pt2", PROGRAMS["torch-export"], Own(random).eval(), {})
    assert not list(tmp_path.iterdir())
