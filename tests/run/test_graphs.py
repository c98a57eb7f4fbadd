"""When forward and backward may be recorded as a CUDA graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tutti.data import Batches, Part
from tutti.errors import BadOption
from tutti.replica import Replica
from tutti.run.build import graph_of
from tutti.run.config import TrainConfig
from tutti.training.evaluation import Objective
from tutti.training.losses import Loss

pytestmark = pytest.mark.usefixtures("nothing_beside")


def test_a_loss_with_a_denominator_of_its_own_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = Batches(Part(torch.zeros(4, 2), torch.zeros(4)), 4)
    monkeypatch.setattr(Part, "device", property(lambda _: torch.device("cuda")))
    own = Loss("own", lambda outputs, targets: (outputs.sum(), 4), weighed=True)
    rest: Any = Objective(own), Replica(nn.Linear(2, 1)), batches
    assert graph_of(TrainConfig(cuda_graph="auto"), *rest) is None
    with pytest.raises(BadOption, match=r"use --cuda-graph off"):
        graph_of(TrainConfig(cuda_graph="on", device="cuda"), *rest)
