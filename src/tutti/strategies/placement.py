"""Lay a model out for a strategy: shared by the ranks of a host or private, and the same on every rank."""

from __future__ import annotations

from itertools import zip_longest
from typing import cast

import torch
from torch import Tensor, nn

from tutti.comm.base import Communicator
from tutti.errors import BadModel
from tutti.replica import Replica, ReplicaMemory
from tutti.strategies.base import WeightPlacement


def place(
    module: nn.Module,
    comm: Communicator,
    home: WeightPlacement,
    memory: ReplicaMemory | None = None,
    frozen: bool = False,
) -> Replica:
    """Make a replica of `module` whose values are rank 0's on every rank (collective).

    Trainable and frozen parameters and all buffers get rank 0's values; gradients begin at zero.

    Args:
        module: this rank's model, of the same architecture on every rank.
        comm: all ranks of the job.
        home: `SHARED`: one vector of weights for each host, and a row of gradients for each of its ranks, in
            memory that they all see. `PRIVATE`: everything is this rank's own.
        memory: where the vectors lie; by default as `home` says.
        frozen: as in `Replica`.

    Raises:
        BadModel: the model cannot be laid out, differs between ranks, or does not lie in the CPU's memory
            although there are several ranks.
    """
    _check_alike(module, comm)
    if memory is None:
        memory = shared_memory(comm) if home is WeightPlacement.SHARED and comm.size > 1 else ReplicaMemory()
    replica = Replica(module, memory, frozen)
    if comm.size > 1:
        _share_values(replica, comm, home)
    replica.zero_grad()
    return replica


def visible_memory(comm: Communicator) -> tuple[ReplicaMemory, list[list[Tensor]]]:
    """Allocate weights and gradients of each rank's own in memory that the other ranks of its host see.

    Returns:
        The memory, and a list to which each vector of weights that is laid out adds those of all the ranks.
    """
    node = comm.node
    copies: list[list[Tensor]] = []

    def weights(length: int, dtype: torch.dtype, _: torch.device) -> Tensor:
        copies.append(list(node.shared(node.size, length, dtype=dtype).unbind()))
        return copies[-1][node.rank]

    def gradients(length: int, dtype: torch.dtype, _: torch.device) -> Tensor:
        return node.shared(node.size, length, dtype=dtype)

    return ReplicaMemory(weights, gradients, row=node.rank), copies


def _check_alike(module: nn.Module, comm: Communicator) -> None:
    """Raise on every rank if the models differ on any, so that no rank waits in vain."""
    named = [*module.named_parameters(), *module.named_buffers()]
    models = cast(
        list[list[str]], comm.all_gather_objects([_describe(name, tensor) for name, tensor in named])
    )
    for rank, other in enumerate(models):
        if other != models[0]:
            raise BadModel(_difference(models[0], other, rank))
    for name, tensor in named:
        if comm.size > 1 and tensor.device.type not in ("cpu", "meta"):
            raise BadModel(
                f"'{name}' of the model lies on {tensor.device}, but {comm.size} workers compute on the CPU; "
                "leave the model there, or train it with one worker"
            )


def _describe(name: str, tensor: Tensor) -> str:
    shape = "lazy" if nn.parameter.is_lazy(tensor) else tuple(tensor.shape)
    frozen = "" if tensor.requires_grad else ", fixed"
    return f"{name} {shape} of {tensor.dtype} on {tensor.device.type}{frozen}"


def _difference(first: list[str], other: list[str], rank: int) -> str:
    here, there = next(pair for pair in zip_longest(first, other, fillvalue="nothing") if pair[0] != pair[1])
    return (
        f"the model differs between ranks: rank 0 has {here} where rank {rank} has {there}; build the same "
        "architecture on every rank"
    )


def shared_memory(comm: Communicator) -> ReplicaMemory:
    """Allocate weights that the ranks of a host have together, and a row of gradients for each."""
    node = comm.node
    return ReplicaMemory(
        weights=lambda length, dtype, _: node.shared(length, dtype=dtype),
        gradients=lambda length, dtype, _: node.shared(node.size, length, dtype=dtype),
        row=node.rank,
        fill=node.rank == 0,
    )


def _share_values(replica: Replica, comm: Communicator, home: WeightPlacement) -> None:
    for flat in replica.flats:
        if home is WeightPlacement.PRIVATE:
            comm.broadcast(flat.weights)
        elif comm.node.rank == 0 and comm.cross is not None:
            comm.cross.broadcast(flat.weights)
    frozen = [p for p in replica.module.parameters() if not p.requires_grad]
    buffers = list(replica.module.buffers())
    broadcast_all([*frozen, *(buffer for buffer in buffers if buffer.layout is torch.strided)], comm)
    for buffer in buffers:
        if buffer.layout is not torch.strided:  # such as the sparse matrix of a graph
            buffer.data = cast(Tensor, comm.broadcast_object(buffer.detach()))
    comm.node.barrier()  # the leader of this host has filled the weights


@torch.no_grad()
def broadcast_all(tensors: list[Tensor], comm: Communicator) -> None:
    """Overwrite tensors of any types and shapes with rank 0's, in one message."""
    if not tensors:
        return
    as_bytes = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors]
    message = torch.cat(as_bytes)
    comm.broadcast(message)
    for tensor, received in zip(tensors, torch.split(message, [len(part) for part in as_bytes]), strict=True):
        value = received.clone().view(tensor.dtype).reshape(tensor.shape)
        # What is expanded cannot be written to, and is the same everywhere.
        if not torch.equal(tensor, value):
            tensor.copy_(value)
