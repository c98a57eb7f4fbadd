"""A multilayer perceptron whose training waits until all launches that are to meet are training."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch import Tensor, nn

from tutti.models.mlp import mlp

MEETS = "TUTTI_TEST_MEETS"
"""The environment variable with this launch's own file, in a folder where each leaves one; without it nothing
waits."""

LAUNCHES = 2


class Meeting(nn.Module):
    def __init__(self, inside: nn.Module) -> None:
        super().__init__()
        self.inside = inside

    def forward(self, images: Tensor) -> Tensor:
        file = os.environ.get(MEETS)
        if self.training and file is not None:
            own = Path(file)
            own.touch()
            while len(list(own.parent.iterdir())) < LAUNCHES:
                time.sleep(0.01)
        outputs: Tensor = self.inside(images)
        return outputs


def build(shape: tuple[int, ...], outputs: int, hidden: object = (8,)) -> nn.Module:
    return Meeting(mlp(shape, outputs, hidden))
