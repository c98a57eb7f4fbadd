"""A chain of layers is cut into stages: evenly, at layers with weights, and with what they share together."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from parallel.models import tied
from tutti.errors import BadModel, BadOption
from tutti.parallel.layout import SCHEDULES, Pipeline
from tutti.parallel.schedules import check_microbatches, owners
from tutti.parallel.stages import Cost, balance, blocks_of, boundaries, measure
from tutti.training.arithmetic import FP32


def costs(*seconds: float, nbytes: int = 0) -> list[Cost]:
    return [Cost(one, nbytes) for one in seconds]


def stages(found: list[slice]) -> list[list[int]]:
    return [list(range(part.start, part.stop)) for part in found]


def test_the_slowest_stage_is_as_fast_as_can_be() -> None:
    assert stages(balance(costs(5, 1, 1, 1, 1, 1), 2)) == [[0], [1, 2, 3, 4, 5]]
    assert stages(balance(costs(1, 2, 3, 4, 5), 3)) == [[0, 1, 2], [3], [4]]


def test_memory_goes_before_time() -> None:
    heavy = [Cost(1, 10), Cost(1, 10), Cost(9, 10), Cost(1, 10)]
    assert stages(balance(heavy, 2)) == [[0, 1], [2, 3]]


def test_time_decides_where_memory_cannot_be_even() -> None:
    assert stages(balance([Cost(4, 1), Cost(5, 2), Cost(1, 97)], 2)) == [[0], [1, 2]]


@pytest.mark.parametrize("count", [1, 2, 5])
def test_every_stage_has_a_block(count: int) -> None:
    found = balance(costs(0, 0, 9, 0, 0), count)
    assert [number for stage in stages(found) for number in stage] == [0, 1, 2, 3, 4]
    assert all(part.stop > part.start for part in found)


def test_a_block_begins_at_each_layer_with_weights() -> None:
    inner = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2))
    blocks = blocks_of(nn.Sequential(nn.Identity(), inner, nn.Flatten(), nn.Linear(8, 3)))
    assert [list(block.layers) for block in blocks] == [["0", "1.0", "1.1", "1.2", "2"], ["3"]]


def test_layers_that_share_a_weight_stay_together() -> None:
    assert [list(block.layers) for block in blocks_of(tied())] == [["0", "1", "2", "3", "4", "5"], ["6"]]


def test_a_model_that_is_no_chain_is_refused() -> None:
    with pytest.raises(BadModel, match=r"the model is a LSTM, and a pipeline needs a chain"):
        blocks_of(nn.LSTM(3, 4))


def test_a_layer_that_mixes_samples_is_refused() -> None:
    blocks = blocks_of(nn.Sequential(nn.Linear(3, 4), nn.Flatten(0), nn.Linear(8, 1)))
    with pytest.raises(BadModel, match=r"layer '0' of the model makes shape \(8,\) of \(2, 3\)"):
        boundaries(blocks, torch.ones(2, 3), FP32)


def test_measuring_leaves_the_model_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 2))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    drawn = torch.get_rng_state()
    found = measure(blocks_of(module), torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), FP32)
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(parameter.grad is None for parameter in module.parameters())
    assert all(cost.seconds > 0 for cost in found)
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
    ("options", "message"),
    [
        (Pipeline("gpipe", 20), r"microbatches is 20, but a pipeline gets 16 samples of a batch"),
        (Pipeline("1f1b", 2), r"1f1b cannot do on 3 ranks; give 3,"),
        (Pipeline("interleaved", 7), r"interleaved cannot do on 3 ranks; give [68],"),
    ],
)
def test_microbatches_that_do_not_fit_are_refused(options: Pipeline, message: str) -> None:
    with pytest.raises(BadOption, match=message):
        check_microbatches(options, 3, 16)
