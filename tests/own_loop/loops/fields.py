"""Programs of several fields, as their authors write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset

from tests.own_loop.jobs import Job, Outcome
from tests.own_loop.loops.base import CLASSES, FEATURES, batches, fit, loop, net, sgd, weights


def _points(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _curve(seed: int = 0) -> nn.Sequential:
    """A function of one number."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).double()


class _Sequences(Dataset):
    def __len__(self) -> int:
        return 10

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return _points(2 + number * 3 % 5, FEATURES, seed=number), number % CLASSES


class _Reader(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.cells = nn.LSTM(FEATURES, 4, 2, bidirectional=True)
        self.out = nn.Linear(8, CLASSES)

    def forward(self, sequences: PackedSequence) -> Tensor:
        _, (hidden, _) = self.cells(sequences)
        return self.out(torch.cat([hidden[-1], hidden[-2]], 1))


def _pack(items: list[tuple[Tensor, int]]) -> tuple[PackedSequence, Tensor]:
    sequences, labels = zip(*items, strict=True)
    return pack_sequence(sequences, enforce_sorted=False), torch.tensor(labels)


@loop
def packed_sequences(job: Job) -> Outcome:
    model = _Reader().double()
    model, optimizer = job.distribute(model, sgd(model))
    for inputs, targets in job.shard(DataLoader(_Sequences(), 4, collate_fn=_pack)):
        optimizer.zero_grad()
        fit(model, inputs, targets).backward()
        optimizer.step()
    return weights(model)


def _names(inputs: Tensor) -> list[str]:
    return [f"{value:.3f}" for value in inputs[:, 0].tolist()]


@loop
def names_beside_the_tensors_of_a_batch(job: Job) -> Outcome:
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
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
    return weights(model)


def _right(job: Job, model: nn.Module) -> Tensor:
    right = 0
    with torch.inference_mode():
        for inputs, targets in job.shard(batches(size=2, seed=5)):
            right += int((model(inputs).argmax(1) == targets).sum())
    return job.total(torch.tensor(right))


@loop
def evaluation_in_inference_mode(job: Job) -> Outcome:
    """Before the first epoch, too."""
    model = net()
    model, optimizer = job.distribute(model, sgd(model))
    right = [_right(job, model)]
    for _ in range(2):
        for inputs, targets in job.shard(batches()):
            optimizer.zero_grad()
            fit(model, inputs, targets).backward()
            optimizer.step()
        right.append(_right(job, model))
    return weights(model), right
