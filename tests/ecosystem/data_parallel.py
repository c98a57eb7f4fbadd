"""DistributedDataParallel and what belongs to it: data_parallel.py FOLDER BACKENDS CHECKS"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

import tutti  # noqa: F401
from tests.ecosystem.outcomes import main

STEPS = 4


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 16))
        self.heads = nn.ModuleList([nn.Linear(16, 4), nn.Linear(16, 4)])

    def forward(self, inputs: Tensor, head: int | None = None) -> Tensor:
        body = self.body(inputs)
        return self.heads[0](body) + self.heads[1](body) if head is None else self.heads[head](body)


def network() -> nn.Module:
    """With the same weights on every device."""
    with torch.device("cpu"):
        made = Network()
    return made.to(torch.get_default_device())


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Other samples on each rank and in each step, the same on every device."""
    samples = torch.Generator("cpu").manual_seed(1000 * dist.get_rank() + step)
    inputs = torch.randn(8, 12, generator=samples, device="cpu")
    targets = torch.randint(4, (8,), generator=samples, device="cpu")
    return inputs.to(torch.get_default_device()), targets.to(torch.get_default_device())


def loss(model: nn.Module, step: int, head: int | None = None) -> Tensor:
    inputs, targets = batch(step)
    return nn.functional.cross_entropy(model(inputs, head), targets)


def train(
    model: nn.Module, steps: int = STEPS, optimizer: optim.Optimizer | None = None
) -> dict[str, Tensor]:
    optimizer = optimizer or optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()
    return weights(model)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def plain() -> dict[str, Tensor]:
    return train(DistributedDataParallel(network()))


def small_buckets_that_are_the_gradients() -> dict[str, Tensor]:
    return train(DistributedDataParallel(network(), bucket_cap_mb=0.001, gradient_as_bucket_view=True))


def unused_parameters() -> dict[str, Tensor]:
    model = DistributedDataParallel(network(), find_unused_parameters=True)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, step, head=(step + dist.get_rank()) % 2).backward()
        optimizer.step()
    return weights(model)


def gradients_accumulated_without_exchange() -> dict[str, Tensor]:
    model = DistributedDataParallel(network())
    with model.no_sync():
        for step in range(STEPS):
            loss(model, step).backward()
    alone = model.module.heads[0].bias.grad.clone()
    loss(model, STEPS).backward()
    return {"before": alone, **{name: value.grad for name, value in model.named_parameters()}}


def uneven_inputs() -> dict[str, Tensor]:
    model = DistributedDataParallel(network())
    with model.join():
        return train(model, steps=2 + 3 * dist.get_rank())


def halves_on_the_wire() -> dict[str, Tensor]:
    model = DistributedDataParallel(network())
    model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return train(model)


def low_rank_on_the_wire() -> dict[str, Tensor]:
    model = DistributedDataParallel(network())
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=2, start_powerSGD_iter=2, min_compression_rate=1
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return train(model, steps=6)


def callbacks_that_exchange_again() -> dict[str, Tensor]:
    """As PowerSGD's do: what runs when an exchange is over waits for another one, by its future."""

    def again(done: torch.futures.Future[list[Tensor]]) -> Tensor:
        return dist.all_reduce(done.value()[0], async_op=True).get_future().wait()[0]

    store, found = dist.group.WORLD.get_group_store(), {}
    for waits in ("for the future", "for the work"):
        vector, called = torch.full((3,), 1.0 + dist.get_rank()), f"{dist.get_backend()} {waits}"
        if dist.get_rank() == 0:
            store.wait([called])
        work = dist.all_reduce(vector, async_op=True)
        future = work.get_future().then(again)
        if dist.get_rank() == 1:
            store.set(called, "")
        if waits == "for the work":
            work.wait()
        found[waits] = future.wait()
    return found


def sharded_optimizer() -> dict[str, Tensor]:
    model = DistributedDataParallel(network())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optim.Adam, lr=0.01)
    trained = train(model, STEPS, optimizer)
    optimizer.consolidate_state_dict(to=0)
    if dist.get_rank():
        return trained
    state = optimizer.state_dict()["state"]
    return trained | {f"moment {number}": part["exp_avg"] for number, part in state.items()}


def objects() -> dict[str, Tensor]:
    rank, size = dist.get_rank(), dist.get_world_size()
    own = {"rank": rank, "text": "na" * (10 + 1000 * rank)}
    gathered: list = [None] * size
    dist.all_gather_object(gathered, own)
    assert [one["rank"] for one in gathered] == list(range(size))
    at_root: list | None = [None] * size if rank == 0 else None
    dist.gather_object(own, at_root, dst=0)
    assert at_root == (gathered if rank == 0 else None)
    said = [own, "last"] if rank == 1 else [None, None]
    dist.broadcast_object_list(said, src=1)
    assert said == [gathered[1], "last"]
    part: list = [None]
    dist.scatter_object_list(part, ["for 0", ("for", 1)] if rank == 0 else None, src=0)
    assert part == [["for 0", ("for", 1)][rank]]
    passed = [own] if rank == 0 else [None]
    if rank == 0:
        dist.send_object_list(passed, dst=1)
    else:
        dist.recv_object_list(passed, src=0)
    assert passed == [gathered[0]]
    return {}


if __name__ == "__main__":
    main(globals())
