"""One call of each operation that Gloo has, too."""

from __future__ import annotations

import torch
from torch import Tensor, distributed
from torch.distributed import ProcessGroup, ReduceOp


def every_operation(group: ProcessGroup | None) -> list[Tensor]:
    """The results of a group's operations on numbers that depend only on the rank."""
    rank, size = distributed.get_rank(group), distributed.get_world_size(group)
    torch.manual_seed(rank)
    found = []
    for length in (7, 50_000):
        for operation in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX):
            tensor = torch.randint(1, 5, (length, 2)).double()
            distributed.all_reduce(tensor, operation, group=group)
            found.append(tensor)
    tensor = torch.randint(0, 100, (5,))
    distributed.all_reduce(tensor, ReduceOp.BXOR, group=group)
    gathered = [torch.zeros(5, dtype=torch.int64) for _ in range(size)]
    distributed.all_gather(gathered, tensor + rank, group=group)
    at_root = [torch.zeros(5, dtype=torch.int64) for _ in range(size)] if rank == 0 else None
    distributed.gather(tensor + rank, at_root, group=group)
    summed = torch.randint(0, 9, (4,))
    distributed.reduce(summed, size - 1, group=group)
    part = torch.zeros(3)
    distributed.reduce_scatter(part, list(torch.randint(0, 9, (size, 3)).float()), group=group)
    dealt = torch.zeros(2)
    distributed.scatter(dealt, list(torch.rand(size, 2)) if rank == 0 else None, group=group)
    swapped = torch.zeros(size * 2)
    distributed.all_to_all_single(swapped, torch.rand(size * 2), group=group)
    told = torch.rand(3)
    distributed.broadcast(told, 0, group=group)
    indices = torch.randint(0, 50, (1, 20 + rank))
    sparse = torch.sparse_coo_tensor(indices, torch.ones(20 + rank, 3), (50, 3), check_invariants=True)
    distributed.all_reduce(sparse, group=group)
    passed_on = torch.zeros(1000)
    if size > 1:
        operations = [
            distributed.P2POp(distributed.isend, torch.rand(1000), group=group, group_peer=(rank + 1) % size),
            distributed.P2POp(distributed.irecv, passed_on, group=group, group_peer=(rank - 1) % size),
        ]
        for work in distributed.batch_isend_irecv(operations):
            work.wait()
    at_last = [summed] if rank == size - 1 else []
    moved = [part, dealt, swapped, told, passed_on]
    return [*found, tensor, *gathered, *(at_root or []), *at_last, *moved, sparse.to_dense()]
