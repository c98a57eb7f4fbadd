"""The all-reduce of sparse tensors: each rank gathers the others' indices and values, and sums them.

rank 0   how many: 2, 1 ┐ indices of both, one after the other ┐ values likewise ┐ sum of equal indices
rank 1   how many: 2, 1 ┘                                      ┘                 ┘ the same sum
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Final, TypeAlias

import torch
from torch import Tensor

from tutti.comm.mpi.collectives import HierarchicalCollectives
from tutti.comm.reductions import Reduction, rounds
from tutti.comm.shm.barrier import Steps
from tutti.comm.shm.collectives import HostCollectives
from tutti.errors import CallsDiffer
from tutti.torch_backend.errors import Unusable
from tutti.torch_backend.staging import Staging

Transport: TypeAlias = HostCollectives | HierarchicalCollectives
_SUMS: Final = ("sum", "avg")


def all_reduce_sparse(transport: Transport, tensor: Tensor, reduction: Reduction) -> Steps:
    """Overwrite a sparse tensor (COO) on every rank with the sum, or the mean, of the ranks' tensors.

    The ranks' tensors have one shape, and any number of elements, any indices. The result is coalesced.

    Raises:
        Unusable: the operation is not a sum or a mean.
        CallsDiffer: the ranks' tensors differ in shape.
    """
    if reduction.name not in _SUMS:
        raise Unusable(
            f"all_reduce of sparse tensors cannot make a {reduction.name}; give ReduceOp.SUM or AVG"
        )
    with torch.no_grad():
        own = tensor.coalesce()
    return _gather_and_sum(transport, tensor, own.indices(), own.values(), reduction.mean)


def _gather_and_sum(
    transport: Transport, tensor: Tensor, indices: Tensor, values: Tensor, mean: bool
) -> Steps:
    own = torch.tensor([len(values), tensor.sparse_dim(), *tensor.shape], device="cpu")
    received = [torch.empty_like(own) for _ in range(transport.size)]
    yield from transport.all_gather(own, received)
    forms = [one.tolist() for one in received]
    if any(form[1:] != forms[0][1:] for form in forms):
        shapes = [tuple(form[2:]) for form in forms]
        raise CallsDiffer(
            f"all_reduce got sparse tensors of the shapes {shapes} with {[form[1] for form in forms]} sparse "
            "dimensions, rank by rank; give tensors of one shape"
        )
    counts = [form[0] for form in forms]
    all_indices = yield from _gather_rows(transport, indices.t(), counts)
    all_values = yield from _gather_rows(transport, values, counts)
    # These become part of the user's tensor, and must be usable outside of inference mode.
    with torch.inference_mode(False), torch.no_grad():
        wide = all_values.float() if rounds(values.dtype) else all_values.clone()
        total = torch.sparse_coo_tensor(
            all_indices.t().clone(), wide, tensor.shape, check_invariants=False
        ).coalesce()
        if mean:
            total.values().div_(transport.size)
        tensor.copy_(total)


def _gather_rows(transport: Transport, own: Tensor, counts: list[int]) -> Generator[bool, None, Tensor]:
    """Gather all ranks' rows of a tensor, one after the other, in rank order."""
    staging = Staging()
    whole = torch.empty((sum(counts), *own.shape[1:]), dtype=own.dtype, device="cpu")
    places = [staging.take(place, read=False) for place in torch.split(whole, counts)]
    yield from transport.all_gather(staging.take(own, write=False), places)
    return whole
