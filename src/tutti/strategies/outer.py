"""Workers whose rounds of local steps begin at an anchor, from which an outer step is made."""

from __future__ import annotations

from typing import Final

from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.optim.sharded import equal_slices
from tutti.replica import Replica
from tutti.state import Saved, State, fill_all, pieces_of
from tutti.strategies.averaged import AveragedWorker, S
from tutti.strategies.base import Clip

ANCHOR: Final = "anchor"
"""The first word of the names of the anchors in a checkpoint."""

VELOCITY: Final = "velocity"
"""The first word of the names of the outer momentum."""


class OuterWorker(AveragedWorker[S]):
    """A worker whose rounds begin at an anchor."""

    def __init__(
        self, strategy: S, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip
    ) -> None:
        super().__init__(strategy, replica, comm, optimizer, clip)
        self.anchors = [weights.clone() for weights in self.weights]
        # Vectors that are the same on all workers, by the first word of their names in a checkpoint.
        self.common = {ANCHOR: self.anchors}

    @override
    def state(self) -> State:
        """Add this rank's slice of the common vectors."""
        state = super().state()
        for name, vectors in self.common.items():
            for flat, vector in zip(self.replica.flats, vectors, strict=True):
                own = equal_slices(flat, self.comm.size)[self.comm.rank]
                state.joint.pieces += pieces_of(name, flat, vector, own)
        return state

    @override
    def load_state(self, saved: Saved) -> None:
        """Continue in the middle of a round, or begin one at the agreed weights."""
        super().load_state(saved)
        if saved.alone is None:
            self.rounds = 0
        for name, vectors in self.common.items():
            if saved.alone is not None or name != ANCHOR:
                fill_all(saved.joint.tensors, name, self.replica.flats, vectors)


def move_outer(anchor: Tensor, delta: Tensor, velocity: Tensor, lr: float, momentum: float) -> None:
    """Make one step of the outer optimizer, SGD with Nesterov's momentum, in place.

        v = momentum v + d
        anchor = anchor - lr (d + momentum v)

    `delta` is d, the anchor minus the workers' mean; `velocity` is v, zeros at first.
    Source: Douillard et al. 2023, "DiLoCo: Distributed Low-Communication Training of Language Models",
    arXiv:2311.08105, algorithm 1, line 14, with the optimizer of section 2.
    Without momentum and with lr 1 it ends at the workers' mean.
    """
    velocity.mul_(momentum).add_(delta)
    anchor.sub_(delta, alpha=lr).sub_(velocity, alpha=lr * momentum)
