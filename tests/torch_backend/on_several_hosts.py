"""Run under mpirun: what a group over MPI does, as lines of JSON from rank 0.

Usage: python on_several_hosts.py HOSTS

HOSTS names the host that each rank counts to, one letter per rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path

import torch
from torch import distributed, nn

sys.path.insert(0, str(Path(__file__).parents[2]))

import tutti  # noqa: F401
from tests.torch_backend.every_operation import every_operation
from tutti.comm.mpi import collectives
from tutti.torch_backend import group as tutti_group


def trained() -> list[float]:
    """The weights after a step of DDP."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.full((2, 3), float(distributed.get_rank()))).square().mean().backward()
    optimizer.step()
    return [float(number) for parameter in model.parameters() for number in parameter.flatten()]


def rounded_once() -> list[float]:
    """A sum of short floats, and this rank's part of one; rounded twice it would be the first of them."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    mine = torch.full((3 * size,), 1.0 if rank else 256.0, dtype=torch.bfloat16)
    part = torch.empty(3, dtype=torch.bfloat16)
    distributed.reduce_scatter_tensor(part, mine)
    distributed.all_reduce(mine)
    return [*mine.tolist(), *part.tolist()]


def digest() -> str:
    """Of a sum of numbers that no two orders of addition make the same."""
    torch.manual_seed(distributed.get_rank())
    vector = torch.randn(100_003) * torch.logspace(-10, 10, 100_003)
    distributed.all_reduce(vector)
    return hashlib.sha256(vector.numpy().tobytes()).hexdigest()


def main() -> None:
    rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    host = sys.argv[1][rank]
    tutti_group.host_key = lambda: host
    # So that vectors of this program have several.
    collectives.PIECE_BYTES = 1 << 18
    distributed.init_process_group("tutti")
    gloo = distributed.new_group(backend="gloo")
    pairs = zip(every_operation(None), every_operation(gloo), strict=True)
    alike = all(torch.equal(ours, theirs) for ours, theirs in pairs)
    half = distributed.new_group([0, distributed.get_world_size() - 1])
    number = torch.ones(1)
    if half is not distributed.GroupMember.NON_GROUP_MEMBER:
        distributed.all_reduce(number, group=half)
    mean = torch.full((3,), 2.0 * rank, dtype=torch.bfloat16)
    distributed.all_reduce(mean, distributed.ReduceOp.AVG)
    found = {
        "alike": alike,
        "half": number.item(),
        "mean": mean.tolist(),
        "rounded once": rounded_once(),
        "digest": digest(),
        "weights": trained(),
    }
    everyone = [None] * distributed.get_world_size()
    distributed.all_gather_object(everyone, found)
    if rank == 0:
        sys.stdout.write(json.dumps(everyone) + "\n")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
