"""An average of the weights, which is evaluated and kept in place of the trained weights.

    ema:d    a = d a + (1 - d) w    after each update; a = w after the first
    swa:s    a = mean of w          over the epochs that end at the share s of the run, or later
    epoch    train w │ a in place of w: keep the best, validate │ w again │ train w │ ...

An EMA follows each update where the workers make it together. Otherwise (private weights, or a centre) the
settled weights of each epoch count: for its k updates by d^k. Each rank averages a slice.

The statistics of BatchNorm have an EMA as the weights do. For SWA they are the mean over batches of the
training part, computed when the average is evaluated.

Sources: Polyak, Juditsky 1992, "Acceleration of Stochastic Approximation by Averaging". Izmailov et al. 2018,
"Averaging Weights Leads to Wider Optima and Better Generalization", arXiv:1803.05407, algorithm 1.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn, get_swa_multi_avg_fn

from tutti.comm.base import cut
from tutti.errors import BadOption
from tutti.replica import copy_all
from tutti.state import LocalState, Saved, State, fill, pieces_of
from tutti.training.batch_norm import batch_norms
from tutti.training.evaluation import average, average_buffers, evaluating
from tutti.training.intervals import Averaging
from tutti.training.precision import Arithmetic
from tutti.training.run_parts import Schedule, Workers


class WeightAverage:
    """The average of a run, sliced over the ranks; with `averaging` None nothing is averaged."""

    def __init__(
        self, averaging: Averaging | None, workers: Workers, schedule: Schedule, arithmetic: Arithmetic
    ) -> None:
        self._batches, updates = schedule.batches, schedule.updates
        self._epochs = updates / self._batches.updates  # the same at any number of ranks
        self._replica, self._comm, self._arithmetic = workers.replica, workers.comm, arithmetic
        self._kind, self._number = averaging or Averaging("", Fraction(0))
        self._first = self._number * updates if self._kind == "swa" else 1  # update that counts
        self._each_update = self._kind == "ema" and not schedule.batches.own and workers.worker.waits
        each, noun = (1, "update") if self._each_update else (self._batches.updates, "epoch")
        if self._kind and (updates - 1) // each * each < max(1, self._first):
            raise BadOption(
                f"--average {self._kind}:{float(self._number):g} has nothing to average, as it takes the "
                f"weights after each {noun}; give more --epochs, or leave it out"
            )
        flats = self._replica.flats if averaging else ()
        self._places = [(flat, cut(len(flat.weights), self._comm.size)[self._comm.rank]) for flat in flats]
        # Only the slice is touched, so only that takes memory.
        self._vectors = [torch.zeros_like(flat.weights) for flat in flats]
        self._layers = [one for one in batch_norms(self._replica.module) if one.running_mean is not None]
        live = [flat.weights[mine] for flat, mine in self._places]
        buffers = [one for layer in self._layers for one in layer.buffers(recurse=False)]
        statistics = [*filter(Tensor.is_floating_point, buffers)] if self._kind == "ema" else []
        self._statistics = [one.clone() for one in statistics]
        self._live, self._changed = [*live, *statistics], [*live, *buffers]
        slices = [vector[mine] for vector, (_, mine) in zip(self._vectors, self._places, strict=True)]
        self._kept = [*slices, *self._statistics]  # the average of `_live`
        self._aside: list[Tensor] = []  # copies of `_changed` while the average is in its place
        self.count = 0  # of the weights in the average

    def add(self, updates: int, epoch_of: int = 0) -> None:
        """Count the weights after `made` updates, or the settled ones after an epoch of some updates."""
        if not self._kind or self._each_update is bool(epoch_of) or updates < self._first:
            return
        if not self.count:
            copy_all(self._kept, self._live)
        else:
            decay, ema = float(self._number) ** (epoch_of or 1), self._kind == "ema"
            move = get_ema_multi_avg_fn(decay) if ema else get_swa_multi_avg_fn()  # type: ignore[no-untyped-call]
            move(self._kept, self._live, self.count)
        self.count += 1

    def show(self) -> None:
        """Put the average in place of the weights, if it has begun (collective)."""
        if self.count:
            self._aside = [one.clone() for one in self._changed]
            self._put(self._kept, self._live)
            if self._layers and self._kind == "swa":
                self._renew_statistics()
            average_buffers(self._replica, self._comm)

    def hide(self) -> None:
        """Put the trained weights back in place (collective)."""
        if self._aside:
            self._put(self._aside, self._changed)
            self._aside = []

    def state(self) -> State:
        """Return the average so far (collective)."""
        cut_up = zip(self._places, self._vectors, strict=True)
        pieces = [piece for (flat, mine), one in cut_up for piece in pieces_of("average", flat, one, mine)]
        means = [one.clone() for one in self._statistics]
        average(means, self._comm)
        shared = {"count": self.count, "epochs": self._epochs, "statistics": means}
        return State(LocalState(pieces), shared=shared, own={"statistics": self._statistics})

    def load_state(self, saved: Saved) -> None:
        """Continue from an earlier run; SWA starts over in a run of another length."""
        if not self._kind or (self._kind == "swa" and saved.shared["epochs"] != self._epochs):
            return
        self.count = saved.shared["count"]
        for (flat, mine), vector in zip(self._places, self._vectors, strict=True):
            fill(saved.joint.tensors, "average", flat, vector, mine)
        copy_all(self._statistics, (saved.own or saved.shared)["statistics"])

    def _put(self, values: list[Tensor], targets: list[Tensor]) -> None:
        self._comm.barrier()  # Others may still use the weights that they share.
        copy_all(targets, values)
        for flat, _ in self._places if self._comm.size > 1 else ():
            self._comm.all_gather(flat.weights)

    def _renew_statistics(self) -> None:
        """Set the statistics of BatchNorm so that the ranks' mean is the mean over all batches."""
        part, comm, module = self._batches.part, self._comm, self._replica.module
        # Of equal lengths: BatchNorm could not use a last batch of one sample.
        batches = part.order(self._batches.seed, 0).tensor_split(-(-len(part) // self._batches.batch_size))
        mine = batches[comm.rank :: comm.size]
        # A layer's `forward` in its `vars` is the one over the batches of all ranks.
        before = [(layer, layer.momentum, vars(layer).pop("forward", None)) for layer in self._layers]
        with evaluating(module):
            for layer in self._layers:
                layer.reset_running_stats()
                layer.momentum = None  # the plain mean
                layer.train()
            for rows in mine:
                comm.note_progress()
                inputs, _ = part.take(rows.to(part.device))
                with torch.no_grad():
                    self._arithmetic.call(module, self._arithmetic.inputs(inputs))
        for layer, momentum, forward in before:
            layer.momentum = momentum
            for one in filter(Tensor.is_floating_point, layer.buffers(recurse=False)):
                one.mul_(len(mine) * comm.size / len(batches))
            vars(layer).update({} if forward is None else {"forward": forward})
