"""A chain of layers is cut into stages: evenly, at layers with weights, and with what they share together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.model_parallel.models import Dropping, Encoder, ResidualNet, Undecided, tied
from tutti.errors import BadModel, BadOption
from tutti.model_parallel.fx_blocks import blocks_of
from tutti.model_parallel.partition import Cost, balance, costs_of
from tutti.model_parallel.schedules import check_microbatches, owners
from tutti.records.pipeline import SCHEDULES
from tutti.training.precision import FP32


def costs(*work: float, nbytes: int = 0) -> list[Cost]:
    return [Cost(one, nbytes) for one in work]


def stages(found: list[slice]) -> list[list[int]]:
    return [list(range(part.start, part.stop)) for part in found]


def test_the_largest_stage_is_as_small_as_can_be() -> None:
    assert stages(balance(costs(5, 1, 1, 1, 1, 1), 2)) == [[0], [1, 2, 3, 4, 5]]
    assert stages(balance(costs(1, 2, 3, 4, 5), 3)) == [[0, 1, 2], [3], [4]]


def test_memory_goes_before_work() -> None:
    heavy = [Cost(1, 10), Cost(1, 10), Cost(9, 10), Cost(1, 10)]
    assert stages(balance(heavy, 2)) == [[0, 1], [2, 3]]


def test_work_decides_where_memory_cannot_be_even() -> None:
    assert stages(balance([Cost(4, 1), Cost(5, 2), Cost(1, 97)], 2)) == [[0], [1, 2]]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_stage_has_a_block(count: int) -> None:
    found = balance(costs(0, 0, 9, 0, 0), count)
    assert [number for stage in stages(found) for number in stage] == [0, 1, 2, 3, 4]
    assert all(part.stop > part.start for part in found)


def layers(module: nn.Module, inputs: Tensor) -> list[list[str]]:
    """The layers of each block of a model, after a look at what the blocks compute."""
    module.eval()
    blocks = blocks_of(module, inputs, FP32)
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


def test_what_a_connection_skips_stays_together() -> None:
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


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.LSTM(3, 4), "the model is a LSTM, which cannot be cut into a pipeline"),
        (Undecided(), r"used as inputs to control flow\). Put what depends on values"),
        (Dropping(), "asks whether it trains; leave that to layers such as nn.Dropout"),
    ],
)
def test_a_model_that_cannot_be_traced_is_refused_with_a_remedy(module: nn.Module, message: str) -> None:
    with pytest.raises(BadModel, match=message):
        blocks_of(module, torch.ones(2, 4), FP32)
    assert all(part.training for part in module.modules())


def test_no_cut_is_made_before_what_changes_its_inputs() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
            self.shift = nn.Parameter(torch.ones(4))

        def forward(self, inputs: Tensor) -> Tensor:
            outputs = self.first(inputs)
            outputs.add_(self.shift)
            return self.third(self.second(outputs).relu_())

    assert layers(Changing(), torch.ones(2, 4)) == [["first", "shift"], ["second"], ["third"]]


def test_a_model_that_is_traced_wrongly_is_refused() -> None:
    class Changed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, inputs: Tensor) -> Tensor:
            outputs = self.layer(inputs)
            same = outputs
            outputs += 1
            return outputs * same

    with pytest.raises(BadModel, match="gives other outputs than the model itself"):
        blocks_of(Changed(), torch.ones(2, 4), FP32)


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


def test_a_layer_that_mixes_samples_is_refused() -> None:
    inputs = torch.ones(2, 3)
    with pytest.raises(BadModel, match="the first dimension of its outputs is not the samples"):
        blocks_of(nn.Sequential(nn.Linear(3, 4), nn.Flatten(0)), inputs, FP32)


def test_counting_costs_leaves_the_model_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    drawn = torch.get_rng_state()
    inputs = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    found, edges = costs_of(blocks_of(module, inputs, FP32), inputs, FP32)
    assert [tuple(edge.shape) for edge in edges] == [(8, 3), (8, 4), (8, 4), (8, 2)]
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(cost.work > 3 * 2 * 8 * 2 * 4 for cost in found)
    assert found[0].nbytes > 4 * 4 * 16


def test_stages_go_around_or_as_a_v() -> None:
    assert {name: owners(name, 3) for name in SCHEDULES} == {
        "gpipe": [0, 1, 2],
        "1f1b": [0, 1, 2],
        "zero_bubble": [0, 1, 2],
        "interleaved": [0, 1, 2, 0, 1, 2],
        "zbv": [0, 1, 2, 2, 1, 0],
    }


@pytest.mark.parametrize(
    ("schedule", "count", "message"),
    [
        ("gpipe", 20, r"microbatches is 20, but a pipeline gets 16 samples of a batch"),
        ("1f1b", 2, r"1f1b cannot do on 3 ranks; give a multiple of 3,"),
        ("interleaved", 7, r"interleaved cannot do on 3 ranks; give a multiple of 3,"),
    ],
)
def test_microbatches_that_do_not_fit_are_refused(schedule: str, count: int, message: str) -> None:
    with pytest.raises(BadOption, match=message):
        check_microbatches(schedule, count, 3, 16)
