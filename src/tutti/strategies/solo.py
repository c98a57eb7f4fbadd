"""One worker: sequential training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.optim.clipping import clip_gradients
from tutti.optim.sharded import ShardedOptimizer
from tutti.registry import part
from tutti.replica import Replica
from tutti.state import Saved, State
from tutti.strategies.base import Clip, Strategy, WeightPlacement, Worker


@part("solo")
@dataclass(frozen=True)
class Solo(Strategy):
    """Sequential training by one worker, the yardstick of every other strategy.

        g = 1/B sum over the batch of grad l(w, sample)
        w = optimizer(w, clip(g))

    The optimizer runs over the flat vectors instead of one parameter after the other.
    """

    home: ClassVar[WeightPlacement] = WeightPlacement.PRIVATE
    joint_norm: ClassVar[bool] = True
    most_workers: ClassVar[int | None] = 1

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        self.check(comm.size)
        return _SoloWorker(replica, optimizer, clip)


class _SoloWorker(Worker):
    def __init__(self, replica: Replica, optimizer: Optimizer, clip: Clip) -> None:
        super().__init__()
        self._replica, self._clip = replica, clip
        self._optimizer = ShardedOptimizer(optimizer, replica)

    @override
    def step(self) -> None:
        with self.updating:
            clip_gradients(self._replica.gradients, self._clip.norm, self._clip.value)
            self._optimizer.step()
            self._replica.zero_grad()

    @override
    def state(self) -> State:
        return State(joint=self._optimizer.state())

    @override
    def load_state(self, saved: Saved) -> None:
        """Do nothing: the optimizer has its state."""

    @override
    def finish(self) -> None:
        """Do nothing: every step leaves the final weights in place."""
