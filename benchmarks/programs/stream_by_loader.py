"""The plain program beside tutti's streaming: a DataLoader over memory-mapped NPY files.

    python stream_by_loader.py MODEL FOLDER BATCH STEPS WORKERS

Prints the samples per second from the first batch to the last.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

from tutti import models


class Mapped(Dataset[tuple[Tensor, int]]):
    """What a user writes for NPY files that memory does not hold."""

    def __init__(self, folder: Path) -> None:
        self.inputs = [np.load(path, mmap_mode="r") for path in sorted(folder.glob("x_train*.npy"))]
        self.targets = [np.load(path, mmap_mode="r") for path in sorted(folder.glob("y_train*.npy"))]
        self.ends = list(accumulate(map(len, self.inputs)))

    def __len__(self) -> int:
        return self.ends[-1]

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        shard = bisect_right(self.ends, index)
        at = index - (self.ends[shard - 1] if shard else 0)
        image = torch.from_numpy(self.inputs[shard][at].copy())[None]
        return image.float() / 255 - 0.5, int(self.targets[shard][at])


def main() -> None:
    name, folder, batch, steps, workers = sys.argv[1:]
    batches = DataLoader(Mapped(Path(folder)), int(batch), shuffle=True, num_workers=int(workers))
    module = models.build(name, (1, 28, 28), 10, {})
    optimizer = torch.optim.Adam(module.parameters())
    seen, began = 0, 0.0
    for step, (inputs, targets) in enumerate(batches):
        if step == 0:
            began = time.perf_counter()
        optimizer.zero_grad()
        loss = functional.cross_entropy(module(inputs), targets)
        loss.backward()
        optimizer.step()
        seen += len(targets) if step else 0
        if step == int(steps):
            break
    print(seen / (time.perf_counter() - began))


if __name__ == "__main__":
    main()
