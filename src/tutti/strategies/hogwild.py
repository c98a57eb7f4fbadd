"""Hogwild: all workers of a host move one vector of weights, without locks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.optim.clipping import clip_gradients
from tutti.optim.parameterwise import is_parameterwise
from tutti.optim.sharded import ShardedOptimizer
from tutti.optim.sparse import RowOptimizer, sparse_tables
from tutti.registry import part
from tutti.replica import Replica
from tutti.state import LocalState, Saved, State
from tutti.strategies.base import Clip, Pace, Strategy, WeightPlacement, Worker


@part("hogwild")
@dataclass(frozen=True)
class Hogwild(Strategy):
    """Lock-free asynchronous training: every worker applies its own gradient to the host's one vector.

        for every batch:   g = grad l(w)            w as it is, while others write to it
                           w = optimizer(w, g)      at once, without a lock

    Of two simultaneous writes to one weight, one may be lost; with sparse gradients that is rare, with dense
    ones it is a little noise. Only the weights are shared: each worker has its own batches and its own
    optimizer state (momentum, Adam's moments).

    Of an `nn.Embedding(sparse=True)`, only the rows that the batch looked up are moved: with SGD without
    momentum, Adagrad, or Adam (as torch's SparseAdam).

        worker 0   │ backward │ w -= │ backward │ w -= │ ...
        worker 1   │ backward    │ w -= │ backward    │ w -= │ ...

    All workers need the same memory, so it runs on one host.

    Source: Niu, Recht, Re, Wright 2011, "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient
    Descent", arXiv:1106.5730, algorithm 1.
    """

    home: ClassVar[WeightPlacement] = WeightPlacement.SHARED
    pace: ClassVar[Pace] = Pace.FREE
    joint_norm: ClassVar[bool] = True
    most_hosts: ClassVar[int | None] = 1

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        self.check(comm.size, comm.hosts)
        return _HogwildWorker(replica, comm, optimizer, clip)


class _HogwildWorker(Worker):
    def __init__(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> None:
        super().__init__()
        tables = sparse_tables(replica.module)
        self._comm, self._clip, self._gradients = comm, clip, replica.gradients
        self._gradients.keep_apart(tables)
        places = self._gradients.places
        _check_parted(optimizer, len(places) + bool(tables))
        self._written = sum(flat.grads[place].nbytes for flat, place in places)
        self._dense = [
            ShardedOptimizer(optimizer, replica, [place if f is flat else slice(0, 0) for f in replica.flats])
            for flat, place in places
        ]
        self._rows = RowOptimizer(optimizer, tables)
        self._names = replica.names
        self._updates, self._seen = comm.counter(), 0
        self._read_at = comm.clock()
        self.restarts = ("the state of each worker's optimizer",)

    @override
    @torch.no_grad()
    def step(self) -> None:
        missing = self._gradients.missing()
        clip_gradients(self._gradients, self._clip.norm, self._clip.value)
        with self.updating:
            for optimizer in self._dense:
                optimizer.step(missing)
            written = self._written + self._rows.step()
        applied_at = self._comm.clock()
        before = self._updates.add()
        self._gradients.zero()
        self.traffic.add(written, 0.0, before - self._seen, applied_at - self._read_at)
        self._seen, self._read_at = before + 1, self._comm.clock()

    @override
    def state(self) -> State:
        """Return the state of this worker's own optimizer."""
        alone = LocalState()
        for optimizer in self._dense:
            alone.add(optimizer.state())
        alone.add(self._rows.state(self._names))
        return State(alone=alone)

    @override
    def load_state(self, saved: Saved) -> None:
        """Do nothing: the optimizer has its state."""

    @override
    def settle(self) -> None:
        """Wait until all have written their updates."""
        self._comm.barrier()

    @override
    def resume(self) -> None:
        """Wait until all have evaluated."""
        self._comm.barrier()

    @override
    def finish(self) -> None:
        self._comm.barrier()


def _check_parted(optimizer: Optimizer, parts: int) -> None:
    """Refuse an optimizer that cannot step each dtype, and the sparse tables, separately."""
    if parts > 1 and not is_parameterwise(optimizer):
        raise BadOption(
            f"the optimizer {type(optimizer).__name__}, which is not one of torch's, would be stepped for "
            f"{parts} parts of the model one by one, and what it may compute over all of them would be "
            "wrong; use an optimizer of torch's, a model of one dtype without sparse embeddings, or "
            "'--strategy sync'"
        )
