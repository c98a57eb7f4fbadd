"""What models consist of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from tests.own_loop.jobs import Job, Outcome
from tests.own_loop.loops.base import (
    CLASSES,
    FEATURES,
    adam,
    batches,
    fit,
    gradients,
    loop,
    of_net,
    samples,
    sgd,
    train,
    weights,
)


class Heads(nn.Module):
    """A body and two heads, of which a loop uses one at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(FEATURES, 4)
        self.heads = nn.ModuleList([nn.Linear(4, CLASSES), nn.Linear(4, CLASSES)])
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, inputs: Tensor, head: int = 0) -> Tensor:
        return self.heads[head](torch.tanh(self.body(inputs)))


def _heads_in_turn(
    job: Job, make: Callable[[nn.Module], Optimizer], order: str, none: bool = True
) -> Outcome:
    torch.manual_seed(3)
    model = Heads().double()
    model, optimizer = job.distribute(model, make(model))
    turns: Iterator[str] = iter(order * 3)
    for _ in range(2):
        for inputs, targets in job.shard(batches()):
            optimizer.zero_grad(set_to_none=none)
            nn.functional.cross_entropy(model(inputs, int(next(turns))), targets).backward()
            optimizer.step()
    return weights(model), gradients(model)


@loop
def heads_in_turn_with_adam(job: Job) -> Outcome:
    return _heads_in_turn(job, adam, "01")


@loop
def ranks_use_different_heads(job: Job) -> Outcome:
    """Each sample says which head it is for: some rank may have no sample for a head."""
    torch.manual_seed(3)
    model = Heads().double()
    model, optimizer = job.distribute(model, sgd(model))
    inputs, targets = samples(12).tensors
    which = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1, 0, 1, 1])
    for part, labels, heads in job.shard([(inputs, targets, which), (inputs[:5], targets[:5], which[:5])]):
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for head in (0, 1):
            if (heads == head).any():
                scores = model(part[heads == head], head)
                loss = loss + nn.functional.cross_entropy(scores, labels[heads == head], reduction="sum")
        (loss / len(part)).backward()
        optimizer.step()
    return weights(model)


@loop
def tied_weights(job: Job) -> Outcome:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES)).double()
    model[2].weight = model[0].weight
    model, optimizer = job.distribute(model, adam(model))
    train(job, model, optimizer, epochs=2)
    assert model[2].weight is model[0].weight
    return weights(model)


@loop
def channels_last_convolutions(job: Job) -> Outcome:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)).double()
    model = model.to(memory_format=torch.channels_last)
    model, optimizer = job.distribute(model, adam(model))
    inputs = torch.randn(7, 3, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for part, targets in job.shard(DataLoader(TensorDataset(inputs, torch.arange(7) % 3), 4)):
        optimizer.zero_grad()
        fit(model, part.to(memory_format=torch.channels_last), targets).backward()
        optimizer.step()
    return weights(model), [
        p.is_contiguous(memory_format=torch.channels_last) for p in model[0].parameters() if p.dim() == 4
    ]


def _embedding(
    job: Job, optimizer: Callable[[nn.Module], Optimizer], sparse: bool, **options: Any
) -> Outcome:
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Embedding(6, 4, sparse=sparse, **options), nn.Flatten(), nn.Linear(8, 3)
    ).double()
    words = torch.randint(6, (9, 2), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(words, torch.arange(9) % 3), 4)
    train(job, *job.distribute(model, optimizer(model)), loader)
    return weights(model)


@loop
def a_sparse_embedding_with_adagrad(job: Job) -> Outcome:
    return _embedding(
        job, lambda m: torch.optim.Adagrad(m.parameters(), lr=0.5, initial_accumulator_value=0.5), sparse=True
    )


@loop
def an_embedding_with_a_largest_norm(job: Job) -> Outcome:
    return _embedding(job, sgd, sparse=False, max_norm=1.0, padding_idx=0)


@of_net(adam)
def gradient_checkpointing(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    for inputs, targets in job.shard(batches()):
        for reentrant in (True, False):
            optimizer.zero_grad()
            hidden = checkpoint(model[:2], inputs.clone().requires_grad_(), use_reentrant=reentrant)
            nn.functional.cross_entropy(model[2](hidden), targets).backward()
            optimizer.step()


@loop
def a_wide_layer_with_a_fused_optimizer(job: Job) -> Outcome:
    """More elements than one piece of a vector has; the second of the layers is used now and then."""
    torch.manual_seed(3)
    model = nn.ModuleList([nn.Linear(FEATURES, 30_000), nn.Linear(FEATURES, 30_000)]).double()
    model, optimizer = job.distribute(model, torch.optim.Adam(model.parameters(), 0.01, fused=True, eps=1e-4))
    for number, (inputs, _) in enumerate(job.shard(batches())):
        optimizer.zero_grad()
        hidden = torch.tanh(model[0](inputs))
        if number != 1:
            hidden = hidden + model[1](inputs)
        hidden.square().mean().mul(1000).backward()
        optimizer.step()
    return [p[::1000] for p in model.parameters()]


@loop
def a_sparse_embedding_beside_dense_layers(job: Job) -> Outcome:
    """The words of one rank's part are not those of another's."""
    torch.manual_seed(3)
    model = nn.ModuleDict(
        {"words": nn.EmbeddingBag(8, 4, sparse=True, mode="mean"), "out": nn.Linear(4, 3)}
    ).double()
    model, optimizer = job.distribute(model, torch.optim.SGD(model.parameters(), lr=0.5))
    words = torch.arange(16).view(8, 2) % 8
    for part, targets in job.shard(DataLoader(TensorDataset(words, torch.arange(8) % 3), 4)):
        for _ in range(2):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model["out"](model["words"](part)), targets).backward()
            optimizer.step()
    return weights(model)


@of_net(sgd)
def a_layer_that_is_replaced(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    """A new head for the same body, with an optimizer of its own."""
    train(job, model, optimizer)
    torch.manual_seed(9)
    model[2] = nn.Linear(4, CLASSES).double()
    model, optimizer = job.distribute(model, sgd(model))
    train(job, model, optimizer)


@of_net(sgd)
def a_layer_that_is_added(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    """Progressive growing: the new layer's parameters join the optimizer."""
    train(job, model, optimizer)
    torch.manual_seed(9)
    added = nn.Linear(CLASSES, CLASSES).double()
    model.append(added)
    optimizer.add_param_group({"params": list(added.parameters())})
    train(job, model, optimizer)
