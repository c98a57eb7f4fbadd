"""An exponential average of the weights, evaluated and kept in place of the weights that are trained.

    a = d a + (1 - d) w    after each update, with decay d; a = w after the first

    epoch    train w │ a in place of w: keep the best, validate │ w again │ train w │ ...

Where workers have weights of their own, or a centre, the settled weights of each epoch count: for its k
updates by d^k. The statistics of BatchNorm are averaged as the weights are. Each rank averages a slice.

Source: Polyak, Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging".
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn

from tutti.comm.base import cut
from tutti.replica import copy_all
from tutti.state import LocalState, Saved, State, fill, pieces_of
from tutti.training.batch_norm import batch_norms
from tutti.training.evaluation import average, average_buffers
from tutti.training.run_parts import Schedule, Workers


class WeightAverage:
    """The average of a run, of which this rank has a slice; with `decay` None nothing is averaged."""

    def __init__(self, decay: float | None, workers: Workers, schedule: Schedule) -> None:
        self._replica, self._comm, self._decay = workers.replica, workers.comm, decay
        self._each_update = not schedule.batches.own and workers.worker.waits
        flats = self._replica.flats if decay is not None else ()
        self._places = [(flat, cut(len(flat.weights), self._comm.size)[self._comm.rank]) for flat in flats]
        # No more than the slice is touched, so the system gives memory for that alone.
        self._vectors = [torch.zeros_like(flat.weights) for flat in flats]
        layers = batch_norms(self._replica.module) if decay is not None else ()
        buffers = [one for layer in layers for one in layer.buffers(recurse=False)]
        statistics = [*filter(Tensor.is_floating_point, buffers)]
        self._statistics = [one.clone() for one in statistics]
        self._live = [*(flat.weights[mine] for flat, mine in self._places), *statistics]
        slices = [vector[mine] for vector, (_, mine) in zip(self._vectors, self._places, strict=True)]
        self._kept = [*slices, *self._statistics]  # the average of `_live`
        self._aside: list[Tensor] = []  # copies of `_live` while the average is in its place
        self.count = 0  # of the weights in the average

    def add(self, epoch_of: int = 0) -> None:
        """Count the weights after an update, or the settled ones after an epoch of some updates."""
        if self._decay is None or self._each_update is bool(epoch_of):
            return
        if self.count:
            move = get_ema_multi_avg_fn(self._decay ** (epoch_of or 1))  # type: ignore[no-untyped-call]
            move(self._kept, self._live, self.count)
        else:
            copy_all(self._kept, self._live)
        self.count += 1

    def show(self) -> None:
        """Put the average in place of the weights, if it has begun (collective)."""
        if self.count:
            self._aside = [one.clone() for one in self._live]
            self._put(self._kept)
            average_buffers(self._replica, self._comm)

    def hide(self) -> None:
        """Put the weights that are trained in their place again (collective)."""
        if self._aside:
            self._put(self._aside)
            self._aside = []

    def state(self) -> State:
        """Return the average so far (collective)."""
        cut_up = zip(self._places, self._vectors, strict=True)
        pieces = [piece for (flat, mine), one in cut_up for piece in pieces_of("average", flat, one, mine)]
        means = [one.clone() for one in self._statistics]
        average(means, self._comm)
        shared = {"count": self.count, "statistics": means}
        return State(LocalState(pieces), shared=shared, own={"statistics": self._statistics})

    def load_state(self, saved: Saved) -> None:
        """Go on from an earlier run."""
        if self._decay is None:
            return
        self.count = saved.shared["count"]
        for (flat, mine), vector in zip(self._places, self._vectors, strict=True):
            fill(saved.joint.tensors, "average", flat, vector, mine)
        copy_all(self._statistics, (saved.own or saved.shared)["statistics"])

    def _put(self, values: list[Tensor]) -> None:
        self._comm.barrier()  # Others may still use the weights that they share.
        copy_all(self._live, values)
        for flat, _ in self._places if self._comm.size > 1 else ():
            self._comm.all_gather(flat.weights)
