"""A program of a user of torch.distributed: prints the sum of the ranks' numbers, one line for each rank."""

import sys

import torch
from torch import distributed

if "without tutti" not in sys.argv:
    import tutti  # noqa: F401

distributed.init_process_group("tutti")
tensor = torch.tensor([distributed.get_rank() + 1.0])
distributed.all_reduce(tensor)
sys.stdout.write(f"{distributed.get_rank()} of {distributed.get_world_size()}: {tensor.item()}\n")
if "mpi4py" in sys.modules:
    sys.stdout.write("mpi4py was imported\n")
distributed.destroy_process_group()
