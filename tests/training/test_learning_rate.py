"""What the learning rate of a run knows of the optimizer."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tutti.errors import BadOption
from tutti.training.learning_rate import LearningRate


def test_an_option_of_a_param_group_that_no_checkpoint_can_have_is_named() -> None:
    optimizer = torch.optim.AdamW(nn.Linear(2, 2).parameters(), lr=0.5)
    options = LearningRate(optimizer, None, 0).state()["options"]
    assert (options[0]["lr"], list(options[0]["betas"])) == (0.5, [0.9, 0.999])
    optimizer.param_groups[0]["noise"] = torch.Generator()
    with pytest.raises(BadOption, match=r"param_groups\[0\]\['noise'\] is of type Generator"):
        LearningRate(optimizer, None, 0).state()
