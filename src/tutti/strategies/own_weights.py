"""A worker with its own weights."""

from __future__ import annotations

from abc import abstractmethod
from typing import Final

from torch import Tensor
from typing_extensions import override

from tutti.optim.clipping import clip_gradients
from tutti.optim.sharded import ShardedOptimizer
from tutti.replica import Replica, copy_all
from tutti.state import LocalState, Saved, State, fill_all, pieces_of_all
from tutti.strategies.base import Clip, Worker

OWN: Final = "own_weights"
"""The first word of the names of weights that are a worker's own, in a checkpoint."""


class OwnWeightsWorker(Worker):
    """A worker with its own weights, which are put aside while the agreed ones are evaluated."""

    def __init__(self, replica: Replica, steps: ShardedOptimizer | None, clip: Clip) -> None:
        super().__init__()
        self.replica, self.steps, self._clip = replica, steps, clip
        self.weights = [flat.weights for flat in replica.flats]
        self.grads = [flat.grads for flat in replica.flats]
        self._aside: list[Tensor] = []
        # This worker's vectors besides its weights, by the first word of their names in a checkpoint.
        self.private: dict[str, list[Tensor]] = {}
        own = ("each worker's own weights",)
        self.restarts = own if steps is None else (*own, "the state of each worker's optimizer")

    @property
    def settled(self) -> bool:
        """True while the replica has the weights to be evaluated, and this worker's own are put aside."""
        return bool(self._aside)

    def move(self) -> None:
        """Step by this worker's own gradient, which is zero afterwards."""
        assert self.steps is not None
        with self.updating:
            self.prepare()
            self.steps.step()
            self.replica.zero_grad()

    def prepare(self) -> None:
        """Clip this worker's own gradient."""
        clip_gradients(self.replica.gradients, self._clip.norm, self._clip.value)

    @abstractmethod
    def agree(self) -> None:
        """Overwrite the weights with those to be evaluated (collective)."""

    @override
    def settle(self) -> None:
        self._aside = [weights.clone() for weights in self.weights]
        self.agree()

    @override
    def resume(self) -> None:
        if self._aside:
            copy_all(self.weights, self._aside)
            self._aside = []

    @override
    def state(self) -> State:
        """Return the weights put aside, the private vectors, and the optimizer's state."""
        alone = LocalState()
        for name, vectors in {OWN: self._aside, **self.private}.items():
            alone.pieces += pieces_of_all(name, self.replica.flats, vectors)
        if self.steps is not None:
            alone.add(self.steps.state())
        return State(alone=alone)

    @override
    def load_state(self, saved: Saved) -> None:
        """Continue from this worker's own vectors if they were kept, else from the agreed weights."""
        if saved.alone is not None:
            for name, vectors in {OWN: self.weights, **self.private}.items():
                fill_all(saved.alone.tensors, name, self.replica.flats, vectors)

    @override
    def finish(self) -> None:
        self.agree()
        self._aside = []
