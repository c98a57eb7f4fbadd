"""What the tests of the loop train: clouds of points, a tiny model, and workers with weights of their own."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.trainers import Forgetful
from tutti.comm.base import Communicator
from tutti.data.parts import Part
from tutti.replica import Replica


def blobs(samples: int, seed: int = 3) -> Part:
    """Four clouds of points, a class each."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(4, 12, generator=torch.Generator().manual_seed(1))
    targets = torch.randint(0, 4, (samples,), generator=generator)
    return Part(centres[targets] + torch.randn(samples, 12, generator=generator), targets)


def model(*, norm: bool = False) -> nn.Module:
    """The same weights every time."""
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(16) if norm else nn.Identity()
    return nn.Sequential(nn.Linear(12, 16), middle, nn.Tanh(), nn.Linear(16, 4))


class Apart(Forgetful):
    """Trains on its own batches and on its own; what is evaluated, and what is left, is the mean of all."""

    def __init__(self, replica: Replica, comm: Communicator, optimizer: Optimizer) -> None:
        super().__init__()
        self.replica, self.comm, self.optimizer = replica, comm, optimizer
        self.calls: list[str] = []
        self.trajectory: list[Tensor] = []
        self.kept: list[Tensor] = []

    def step(self) -> None:
        self.calls.append("step")
        self.optimizer.step()
        self.replica.zero_grad()
        self.traffic.add(bytes_sent=8, wait_s=0.5, staleness=len(self.calls) % 3, age_s=0.25)
        self.trajectory.append(self.replica.flats[0].weights.clone())

    def skip(self) -> None:
        self.calls.append("skip")

    def settle(self) -> None:
        self.calls.append("settle")
        self.kept = [flat.weights.clone() for flat in self.replica.flats]
        self.finish()

    def resume(self) -> None:
        self.calls.append("resume")
        for flat, own in zip(self.replica.flats, self.kept, strict=True):
            flat.weights.copy_(own)

    def finish(self) -> None:
        for flat in self.replica.flats:
            self.comm.all_reduce(flat.weights)
            flat.weights.div_(self.comm.size)
