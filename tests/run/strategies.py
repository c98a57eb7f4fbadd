"""Strategies whose workers have batches of their own, for the tests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.optim import Optimizer

from tests.training.blobs import Apart
from tutti.comm.base import Communicator
from tutti.replica import Replica
from tutti.strategies import Clip, Strategy, WeightPlacement, Worker
from tutti.strategies.base import Pace


@dataclass(frozen=True)
class Alone(Strategy):
    """Each worker trains on its own; the final weights are the mean."""

    name: ClassVar[str] = "alone"
    home: ClassVar[WeightPlacement] = WeightPlacement.PRIVATE
    pace: ClassVar[Pace] = Pace.ABREAST

    every: int = 1

    @property
    def passes(self) -> int:
        return self.every

    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        return Apart(replica, comm, optimizer)


@dataclass(frozen=True)
class Free(Alone):
    """The same; its workers wait for nobody."""

    name: ClassVar[str] = "free"
    pace: ClassVar[Pace] = Pace.FREE


@dataclass(frozen=True)
class Together(Alone):
    """The same; each of its workers has a part of every batch."""

    name: ClassVar[str] = "together"
    pace: ClassVar[Pace] = Pace.TOGETHER
