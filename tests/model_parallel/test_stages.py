"""A model is cut into stages: evenly, at layers with weights, and with what they share together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.model_parallel.models import Encoder, ResidualNet, tied
from tutti.errors import BadModel, BadOption
from tutti.model_parallel.schedules import check_microbatches
from tutti.model_parallel.stages import balance, blocks_of, stages_of
from tutti.training.precision import FP32


@pytest.mark.parametrize(
    ("work", "nbytes", "expected"),
    [
        ([5, 1, 1, 1, 1, 1], [0] * 6, [[0], [1, 2, 3, 4, 5]]),
        ([1, 2, 3, 4, 5], [0] * 5, [[0, 1, 2], [3], [4]]),
        ([1, 1, 9, 1], [10] * 4, [[0, 1], [2, 3]]),
        ([4, 5, 1], [1, 2, 97], [[0], [1, 2]]),
        ([0, 0, 9, 0, 0], [0] * 5, [[0], [1], [2], [3], [4]]),
    ],
)
def test_the_largest_share_of_a_stage_is_as_small_as_can_be(
    work: list[float], nbytes: list[int], expected: list[list[int]]
) -> None:
    found = balance(work, nbytes, len(expected))
    assert [list(range(part.start, part.stop)) for part in found] == expected


def layers(module: nn.Module, inputs: Tensor) -> list[list[str]]:
    """The layers of each block of a model, after a look at what the blocks compute."""
    module.eval()
    blocks, _ = blocks_of(module, inputs, FP32)
    outputs = inputs
    for block in blocks:
        outputs = block.module(outputs)
    torch.testing.assert_close(outputs, module(inputs))
    return [list(block.layers) for block in blocks]


def test_a_block_begins_at_each_layer_with_weights() -> None:
    inner = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2))
    module = nn.Sequential(nn.Identity(), inner, nn.Flatten(), nn.Linear(8, 3))
    assert layers(module, torch.ones(2, 1, 6, 6)) == [["0", "1.0", "1.1", "1.2", "2"], ["3"]]


def test_layers_that_share_a_weight_stay_together() -> None:
    assert layers(tied(), torch.ones(2, 1, 14, 14)) == [["0", "1", "2", "3", "4", "5"], ["6"]]


def test_layers_below_a_skip_connection_stay_together() -> None:
    assert layers(ResidualNet(), torch.randn(2, 1, 14, 14)) == [
        ["stem"],
        *([f"blocks.{at}"] for at in range(4)),
        ["head"],
    ]


def test_bare_parameters_and_attention_can_be_in_blocks() -> None:
    assert layers(Encoder(), torch.randn(2, 1, 14, 14)) == [
        ["embed"],
        ["token"],
        ["positions", "scale"],
        ["layers.0", "scale"],
        ["layers.1", "scale"],
        ["layers.2"],
        ["head"],
    ]


class Undecided(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return inputs if inputs.sum() > 0 else -inputs


class Dropping(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        return functional.dropout(inputs, 0.5, self.training)


class Changed(nn.Module):
    def forward(self, inputs: Tensor) -> Tensor:
        outputs = inputs + 1
        same = outputs
        outputs += 1
        return outputs * same


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.LSTM(3, 4), "the model is a LSTM, which cannot be cut into a pipeline"),
        (Undecided(), r"used as inputs to control flow\). Put what depends on values"),
        (Dropping(), "asks whether it trains; leave that to layers such as nn.Dropout"),
        (Changed(), "gives other outputs than the model itself"),
        (nn.Flatten(0), "the first dimension of its outputs is not the samples"),
    ],
)
def test_a_model_that_cannot_be_traced_is_refused_with_a_remedy(module: nn.Module, message: str) -> None:
    with pytest.raises(BadModel, match=message):
        blocks_of(module, torch.ones(2, 4), FP32)
    assert all(part.training for part in module.modules())


def test_no_cut_is_made_where_the_first_dimension_is_not_the_samples() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.turned, self.last = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 1)
            self.again = nn.Linear(3, 3)

        def forward(self, inputs: Tensor) -> Tensor:
            turned = self.turned(self.first(inputs).transpose(0, 1))
            return self.last(self.again(turned).transpose(0, 1))

    # Two samples of two rows: by their lengths nobody could tell.
    assert layers(Turned(), torch.ones(2, 2, 4)) == [["first"], ["turned", "again"], ["last"]]


def test_cutting_leaves_the_model_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    drawn = torch.get_rng_state()
    stages, shapes = stages_of(module, torch.ones(8, 3), FP32, 2)
    assert [tuple(shape.shape) for shape in shapes] == [(8, 3), (8, 4), (8, 2)]
    assert all(stage.work > 2 * 8 * 2 * 4 for stage in stages)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize(("schedule", "count"), [("gpipe", 20), ("1f1b", 2)])
def test_microbatches_that_do_not_fit_are_refused(schedule: str, count: int) -> None:
    with pytest.raises(BadOption, match=f"microbatches is {count}"):
        check_microbatches(schedule, count, 3, 16)
