"""A program of a user of torch.distributed: meets twice, and says at which ports it can be reached."""

import sys

import psutil
import torch
from torch import distributed

sums = []
for _ in range(2):
    distributed.init_process_group("tutti")
    tensor = torch.tensor([distributed.get_rank() + 1.0])
    distributed.all_reduce(tensor)
    sums.append(str(tensor.item()))
    found = [one for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN]
    distributed.destroy_process_group()
sys.stdout.write(f"sum {' '.join(sums)} listening {[tuple(one.laddr) for one in found]}\n")
