"""An ordinary program with FSDP2's `fully_shard`: torchrun --nproc-per-node 2 fsdp.py BACKEND

Global batch 128, Adam, samples that lie in memory. Prints samples/s by model as JSON.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import tutti  # noqa: F401

BATCH = 128
STEPS = 40


def main() -> None:
    dist.init_process_group(sys.argv[1])
    torch.manual_seed(0)
    layers = [nn.Flatten(), nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(2048, 10))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    inputs = torch.randn(BATCH // dist.get_world_size(), 1, 28, 28)
    targets = torch.randint(10, (len(inputs),))
    optimizer = torch.optim.Adam(model.parameters())
    began = 0.0
    for step in range(-STEPS // 5, STEPS):
        if step == 0:
            dist.barrier()
            began = perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    dist.barrier()
    if dist.get_rank() == 0:
        print(json.dumps({"mlp, 5.8 M": BATCH * STEPS / (perf_counter() - began)}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
