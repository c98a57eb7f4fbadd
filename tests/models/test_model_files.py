"""Files that hold a whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tutti import models
from tutti.errors import BadModel, BadOption, UnknownName
from tutti.run import trust
from tutti.run.config import TrainConfig
from tutti.run.names import check_files


class Attention(nn.Module):
    """Everything that a program of torch.export fixes: dropout, BatchNorm, and a probability."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout, self.output = nn.BatchNorm1d(3), nn.Dropout(0.5), nn.Linear(4, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        steps = self.norm(inputs)
        dropped = 0.3 if self.training else 0.0
        found = functional.scaled_dot_product_attention(steps, steps, steps, dropout_p=dropped)
        return self.output(self.dropout(found).mean(dim=1))


def exported(module: nn.Module, path: Path, dynamic: bool = True) -> str:
    samples = {0: torch.export.Dim("samples")} if dynamic else None
    inputs = torch.randn(4, 3, 4, dtype=torch.float64)
    program = torch.export.export(module, (inputs,), dynamic_shapes=(samples,) if dynamic else None)
    torch.export.save(program, path)
    return str(path)


def test_a_program_of_torch_export_trains_as_the_module_it_was(tmp_path: Path) -> None:
    own = Attention().double()
    named = exported(own.train(), tmp_path / "net.pt2")
    module = models.build(named, (3, 4), 2)
    assert [(n, p.shape) for n, p in module.named_parameters()] == [
        (n, p.shape) for n, p in own.named_parameters()
    ]
    found = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in own.state_dict().items())
    inputs = torch.randn(7, 3, 4, dtype=torch.float64)
    for mode in (True, False, True):
        outputs = []
        for one in (own.train(mode), module.train(mode)):
            torch.manual_seed(3)
            outputs.append(one(inputs))
            outputs[-1].sum().backward()
        assert torch.equal(*outputs)
    # Statistics too: they were updated in training alone.
    assert torch.equal(module.get_buffer("norm.running_var"), own.norm.running_var)
    for (name, parameter), mine in zip(module.named_parameters(), own.parameters(), strict=True):
        assert torch.equal(parameter.grad, mine.grad), name

    with pytest.raises(UnknownName, match="unknown option 'width' of the model"):
        models.build(named, (3, 4), 2, {"width": 3})


def test_a_program_for_one_number_of_samples_is_refused(tmp_path: Path) -> None:
    named = exported(nn.Linear(4, 2).double(), tmp_path / "net.pt2", dynamic=False)
    with pytest.raises(
        BadModel, match=r"exactly 4 samples.*dynamic_shapes=\{'input': \{0: torch.export.Dim\("
    ):
        models.build(named, (3, 4), 2)


def test_a_file_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pt2"
    broken.write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(BadModel, match=r"broken.pt2' cannot be read: .*torch.export.save"):
        models.build(str(broken), (3, 4), 2)
    config = TrainConfig(model=str(tmp_path / "none.pt2"))
    for refused in (lambda: models.build(config.model, (3,), 2), lambda: check_files(config)):
        with pytest.raises(BadOption, match=r"there is no .*none.pt2; check the path"):
            refused()
    with pytest.raises(BadOption, match=r"none.pt2; check the path"):
        models.MODELS.check(config.model)


def test_the_file_of_a_model_is_code(tmp_path: Path) -> None:
    config = {"model": "net.pt2"}
    assert trust.code_named(config) == config
    with pytest.raises(trust.Untrusted, match=r"would run code: model 'net.pt2'"):
        trust.check(tmp_path / "config.json", config)
