"""PyTorch's tutorial on DDP, in short: the program starts its ranks. spawned.py FOLDER BACKENDS CHECKS"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn, optim
from torch.nn.parallel import DistributedDataParallel

import tutti  # noqa: F401
from tests.ecosystem.jobs import meeting_point
from tests.ecosystem.outcomes import RANKS, main
from tests.preloaded.children import forked_children


class ToyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1 = nn.Linear(10, 10)
        self.relu = nn.ReLU()
        self.net2 = nn.Linear(10, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net2(self.relu(self.net1(inputs)))


def checkpoint_of_one_rank_read_by_all() -> dict[str, Tensor]:
    rank = dist.get_rank()
    model = DistributedDataParallel(ToyModel())
    path = Path(sys.argv[1], f"{dist.get_backend()}.checkpoint")
    if rank == 0:
        torch.save(model.state_dict(), path)
    dist.barrier()
    model.load_state_dict(torch.load(path))
    optimizer = optim.SGD(model.parameters(), lr=0.001)
    inputs = torch.randn(20, 10, generator=torch.Generator().manual_seed(rank))
    nn.functional.mse_loss(model(inputs), torch.zeros(20, 5)).backward()
    optimizer.step()
    return {name: value.detach() for name, value in model.named_parameters()}


def demo(rank: int, arguments: list[str]) -> None:
    sys.argv[1:] = arguments
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(RANKS)}
    main(globals())


if __name__ == "__main__":
    with meeting_point() as variables, forked_children():
        os.environ |= variables
        mp.spawn(demo, args=(sys.argv[1:],), nprocs=RANKS)
