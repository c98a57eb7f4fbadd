"""FSDP2, DTensor, pipelines and checkpoints: model_parallel.py FOLDER BACKENDS CHECKS"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tutti  # noqa: F401
from tests.ecosystem.outcomes import main

STEPS = 3
WIDTH = 12


def network(hidden: int = 33) -> nn.Sequential:
    """By default, a first layer whose rows cannot be dealt evenly: FSDP pads them."""
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.ReLU(), nn.Linear(hidden, WIDTH))


def batch(step: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    samples = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(8, WIDTH, generator=samples), torch.randn(8, WIDTH, generator=samples)


def train(model: nn.Module, optimizer: optim.Optimizer, steps: int = STEPS, rank: int = 0) -> Tensor:
    """The losses."""
    losses = []
    for step in range(steps):
        inputs, targets = batch(step, rank)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack([one.full_tensor() if isinstance(one, DTensor) else one for one in losses])


def sharded_network() -> tuple[nn.Module, optim.Optimizer]:
    model = network()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    return model, optim.Adam(model.parameters(), lr=0.01)


def mesh_in_two_dimensions() -> dict[str, Tensor]:
    found = {}
    for shape in ((1, 2), (2, 1)):
        torch.manual_seed(0)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
        model = network(32)
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        fully_shard(model, mesh=mesh["data"])
        rank = mesh["data"].get_local_rank()
        losses = train(model, optim.SGD(model.parameters(), lr=0.1), rank=rank)
        weights = {name: value.full_tensor().detach() for name, value in model.named_parameters()}
        found |= {f"{shape} {name}": value for name, value in (weights | {"losses": losses}).items()}
    return found


def checkpoint_of_shards() -> dict[str, Tensor]:
    model, optimizer = sharded_network()
    train(model, optimizer, rank=dist.get_rank())
    folder = shared_folder()
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    torch.manual_seed(1)
    again, second = sharded_network()
    weights, moments = get_state_dict(again, second)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(again, second, model_state_dict=weights, optim_state_dict=moments)
    pairs = [train(*one, rank=dist.get_rank()) for one in ((model, optimizer), (again, second))]
    torch.testing.assert_close(pairs[0], pairs[1])
    return {"losses": pairs[1]}


def shared_folder() -> Path:
    """An empty folder that all ranks know."""
    path = [tempfile.mkdtemp(dir=sys.argv[1])] if dist.get_rank() == 0 else [None]
    dist.broadcast_object_list(path, src=0)
    return Path(path[0])


if __name__ == "__main__":
    # What programs do that shall work under mpirun without tutti.
    os.environ |= {
        "RANK": os.environ["OMPI_COMM_WORLD_RANK"],
        "WORLD_SIZE": os.environ["OMPI_COMM_WORLD_SIZE"],
    }
    main(globals())
