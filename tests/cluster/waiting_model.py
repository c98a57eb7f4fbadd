"""A model whose training waits, at its third step, until the job has been asked to stop or a node is gone."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch import Tensor, nn

from tutti.launch.stop_request import stop_requested

WAITS_FOR = "TUTTI_TEST_WAITS_FOR"
"""The environment variable with a file whose existence ends the wait, too; without it nothing waits."""

STEP = 3


class Waiting(nn.Module):
    """A layer; what it counts is saved with the run, so that it waits once."""

    def __init__(self, outputs: int) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(64, outputs), 0

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            file = os.environ.get(WAITS_FOR)
            if self.calls == STEP and file is not None:
                Path(f"{file}.reached").touch()
                while not (stop_requested() or Path(file).exists()):
                    time.sleep(0.01)
        outputs: Tensor = self.layer(images.flatten(1))
        return outputs


def build(shape: tuple[int, ...], outputs: int) -> nn.Module:
    return Waiting(outputs)
