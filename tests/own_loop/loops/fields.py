"""Programs of several fields, as their authors write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.own_loop.jobs import Job, Outcome
from tests.own_loop.loops.base import batches, fit, of_net, sgd, train


def _names(inputs: Tensor) -> list[str]:
    return [f"{value:.3f}" for value in inputs[:, 0].tolist()]


@of_net(sgd)
def names_beside_the_tensors_of_a_batch(job: Job, model: nn.Sequential, optimizer: Optimizer) -> None:
    dealt = [
        (inputs, {"names": _names(inputs), "ranks": tuple(targets.tolist())}, 7, ("a",) * 9)
        for inputs, targets in batches(size=3)
    ]
    for inputs, extra, number, others in job.shard(dealt):
        assert extra["names"] == _names(inputs)
        assert (number, len(others)) == (7, 9)
        optimizer.zero_grad()
        fit(model, inputs, torch.tensor(extra["ranks"])).backward()
        optimizer.step()


def _right(job: Job, model: nn.Module) -> Tensor:
    right = 0
    with torch.inference_mode():
        for inputs, targets in job.shard(batches(size=2, seed=5)):
            right += int((model(inputs).argmax(1) == targets).sum())
    return job.total(torch.tensor(right))


@of_net(sgd)
def evaluation_in_inference_mode(job: Job, model: nn.Sequential, optimizer: Optimizer) -> Outcome:
    """Before the first epoch, too."""
    right = [_right(job, model)]
    for _ in range(2):
        train(job, model, optimizer)
        right.append(_right(job, model))
    return right
