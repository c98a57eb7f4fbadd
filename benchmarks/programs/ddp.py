"""An ordinary program with DistributedDataParallel: torchrun --nproc-per-node 2 ddp.py BACKEND

Global batch 128, Adam, samples that lie in memory. Prints samples/s by model as JSON.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tutti  # noqa: F401
from tutti import models

BATCH = 128
RUNS = {
    "mlp, 235 k": ("mlp", {}, 400),
    "mlp, 5.8 M": ("mlp", {"hidden": [2048, 2048]}, 40),
    "lenet": ("lenet", {}, 120),
}
"""By name: model, its options, and how many steps are timed."""


def train(model: str, options: dict[str, object], steps: int) -> float:
    """Samples per second."""
    torch.manual_seed(0)
    module = DistributedDataParallel(models.build(model, (1, 28, 28), 10, options))
    inputs = torch.randn(BATCH // dist.get_world_size(), 1, 28, 28)
    targets = torch.randint(10, (len(inputs),))
    optimizer = torch.optim.Adam(module.parameters(), fused=True)
    loss = nn.CrossEntropyLoss()
    began = 0.0
    for step in range(-steps // 5, steps):
        if step == 0:
            dist.barrier()
            began = perf_counter()
        optimizer.zero_grad()
        loss(module(inputs), targets).backward()
        optimizer.step()
    dist.barrier()
    return BATCH * steps / (perf_counter() - began)


def main() -> None:
    dist.init_process_group(sys.argv[1])
    found = {name: train(*run) for name, run in RUNS.items()}
    if dist.get_rank() == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
