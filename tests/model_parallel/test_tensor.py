"""Tensor parallelism: layers are cut over the ranks."""

from __future__ import annotations

import pytest
from torch import nn

from tests.model_parallel.models import grouped
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadModel
from tutti.model_parallel.tensor import split


def test_every_rank_has_its_share_of_the_weights_alone() -> None:
    def program(comm: Communicator) -> list[int]:
        module = nn.Sequential(nn.Conv2d(3, 7, 3), nn.ReLU(), nn.Flatten(), nn.Linear(28, 4))
        split(module, comm)
        return [len(parameter) for parameter in module.parameters()]

    assert VirtualWorld(3).run(program) == [[3, 3, 2, 2], [2, 2, 1, 1], [2, 2, 1, 1]]


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (nn.Sequential(nn.Flatten(), nn.LSTM(14, 8)), r"layer '1' .* LSTM, .* use --parallel sharded"),
        (grouped(), r"layer '1' of the model is a Conv2d of 2 groups"),
        (
            nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)),
            r"layer '1' .* 2 outputs, .* 3 ranks; use tensor=2",
        ),
        (nn.Conv2d(3, 2, 3), r"layer 'Conv2d' of the model has 2 outputs"),
    ],
)
def test_a_layer_that_cannot_be_cut_is_named_with_a_remedy(module: nn.Module, message: str) -> None:
    with pytest.raises(BadModel, match=message):
        VirtualWorld(3).run(lambda comm: split(module, comm) and None)
