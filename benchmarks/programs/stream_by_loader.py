"""The plain program beside tutti's streaming: a DataLoader over memory-mapped NPY files, or webdataset.

    python stream_by_loader.py mapped|webdataset MODEL FOLDER BATCH STEPS WORKERS

Prints the samples per second from the first batch to the last.
"""

from __future__ import annotations

import sys
import time
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
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


def mapped(folder: Path, batch: int, workers: int) -> Iterable[tuple[Tensor, Tensor]]:
    return DataLoader(Mapped(folder), batch, shuffle=True, num_workers=workers)


def decoded(sample: dict[str, bytes]) -> tuple[Tensor, int]:
    pixels = np.frombuffer(sample["x"], np.uint8).reshape(1, 28, 28)
    return torch.from_numpy(pixels.copy()).float() / 255 - 0.5, int(sample["cls"])


def from_tars(folder: Path, batch: int, workers: int) -> Iterable[tuple[Tensor, Tensor]]:
    import webdataset

    tars = sorted(map(str, folder.glob("*.tar")))
    samples = webdataset.WebDataset(tars, shardshuffle=100, nodesplitter=None).shuffle(10_000).map(decoded)
    return DataLoader(samples.repeat().batched(batch), batch_size=None, num_workers=workers)


def main() -> None:
    kind, name, folder, batch, steps, workers = sys.argv[1:]
    batches = {"mapped": mapped, "webdataset": from_tars}[kind](Path(folder), int(batch), int(workers))
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
    assert isinstance(module, nn.Module)
    print(seen / (time.perf_counter() - began))


if __name__ == "__main__":
    main()
