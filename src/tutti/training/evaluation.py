"""Evaluation over all ranks: each sample counts once, in sums over samples, batches and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from typing import Final, NamedTuple, cast

import torch
from torch import Tensor, nn

from tutti.comm.base import Communicator, cut
from tutti.data.columns import Inputs
from tutti.data.parts import Part
from tutti.records.run import Evaluation
from tutti.replica import Replica, copy_all
from tutti.state import Values
from tutti.strategies.placement import broadcast_all
from tutti.training.losses import Loss, LossBatch
from tutti.training.metrics import Metric
from tutti.training.precision import FP32, Arithmetic, is_of_keras
from tutti.training.targets import labelled, predicted, spread

PIECE: Final = 1 << 22
"""The numbers in one message."""

PENDING_NUMBERS = 1 << 16
"""Outputs are kept until there are this many numbers, then counted at once: cheap for small batches."""


class ForwardPass(NamedTuple):
    """The outputs of a model for a batch, and its loss: the sum of the losses / the samples, a scalar."""

    outputs: Tensor  # of shape (n, ...), in the unit of the targets
    loss: Tensor  # the one to differentiate
    weight: float  # of the samples in the loss
    reported: Tensor  # the loss in the unit of the targets


@dataclass(frozen=True)
class Objective:
    """Loss and metrics of a model, and its arithmetic."""

    loss: Loss
    metrics: Sequence[Metric] = ()
    classes: int | None = None  # of the confusion matrix; None: no matrix
    arithmetic: Arithmetic = FP32  # which has prepared the model
    weighted: bool = False  # samples of some part have weights

    def compute(
        self, module: Callable[..., object], inputs: Inputs, targets: Tensor, weights: Tensor | None = None
    ) -> ForwardPass:
        """Compute a model's outputs and loss for a batch.

        A model that returns "members" besides its outputs is an ensemble: the loss is the mean of the
        members'.
        """
        found = self.arithmetic.call(module, inputs)
        outputs = self.arithmetic.output(found)
        if self.loss.whole:
            loss, weight = self.loss.measure(found, LossBatch(inputs, targets), weights)
            return ForwardPass(outputs, loss, weight, loss)
        if not (isinstance(found, Mapping) and "members" in found):
            return self.measure(outputs, targets, weights)
        each = [self.measure(self.arithmetic.output(one), targets, weights) for one in found["members"]]
        loss = torch.stack([one.loss for one in each]).mean()
        reported = torch.stack([one.reported for one in each]).mean()
        return ForwardPass(self.loss.in_units(outputs), loss, each[0].weight, reported)

    def measure(self, outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> ForwardPass:
        """Compute the loss of a network's outputs."""
        loss, weight = self.loss.measure(outputs, targets, weights)
        outputs = self.loss.in_units(outputs)
        return ForwardPass(outputs, loss, weight, self.loss.reported(loss, outputs, targets, weights))


@dataclass(frozen=True)
class Sums:
    """The sums of a tally."""

    counts: Tensor  # samples, labels, and the cells of the confusion matrix: int64, or float64 of weights
    sums: Tensor  # float64: the weight, the sum of the losses, and the sums of each metric
    rows: tuple[Tensor, ...] = ()  # outputs, targets and weights, if a metric gathers them


class Tally:
    """The loss, the metrics and the confusion matrix, summed over samples.

    Losses and metrics are summed in float64, samples and the confusion matrix counted in int64. Values
    on a GPU are summed there, without waiting. Outputs and targets for a metric that gathers go to the CPU.
    Samples without a label count in neither metrics nor matrix. Predictions outside the classes of the
    matrix, and NaN, are counted in one more column; metrics are NaN then. Samples count by their weights.

    Attributes:
        samples: the number counted.
        loss: the sum of their losses; a scalar in float64 if they came as scalars.
        weight: the divisor of that sum: the samples, or the loss's own denominator.
    """

    def __init__(self, objective: Objective, matrix: bool = True) -> None:
        self._metrics = tuple(objective.metrics)
        self._classes = objective.classes if matrix else None
        self._ignored, self._amounts = objective.loss.ignored, objective.loss.amounts
        self.samples, classes = 0, self._classes or 0
        self.loss: float | Tensor = 0.0
        self.weight = 0.0
        self._labelled = 0.0
        self._gathers = any(metric.gathers for metric in self._metrics)
        self._sums = [torch.zeros(metric.width, dtype=torch.float64) for metric in self._metrics]
        self._rows: list[tuple[Tensor, ...]] = []
        dtype = torch.float64 if objective.weighted else torch.int64
        self._confusion = torch.zeros(classes, classes + 1, dtype=dtype)
        self._kept: list[tuple[Tensor, ...]] = []  # outputs, targets and weights not counted yet
        self._pending = 0

    def add(
        self,
        loss: float | Tensor,
        outputs: Tensor,
        targets: Tensor,
        weight: float | None = None,
        weights: Tensor | None = None,
    ) -> None:
        """Count a batch.

        Args:
            loss: the sum of its losses / its samples; a scalar on a GPU may be overwritten afterwards.
            outputs: of the model, of shape (n, ...), without gradient.
            targets: of shape (n, ...).
            weight: the denominator of its losses; None: its number of samples.
            weights: of its samples, of shape (n,).
        """
        count = len(targets)
        self.samples += count
        self.weight += count if weight is None else weight
        if isinstance(loss, Tensor):
            if not isinstance(self.loss, Tensor):
                self.loss = loss.new_full((), self.loss, dtype=torch.float64)
            self.loss.add_(loss, alpha=count)
        else:
            self.loss += loss * count
        if self._metrics or self._classes is not None:
            self._kept.append((outputs, targets) if weights is None else (outputs, targets, weights))
            self._pending += outputs.numel()
            if self._pending >= PENDING_NUMBERS:
                self._count()

    def here(self) -> Evaluation:
        """Return the figures of this rank so far, without metrics that gather.

        The tally stays as it is: the order of its sums, and so their rounding, must not depend on this call.
        """
        mine = copy(self)
        mine._gathers, mine._rows = False, []
        return self._evaluation(mine.sums(), [])

    def total(self, comm: Communicator) -> Evaluation:
        """Return the sums over all ranks (collective); equal on all of them."""
        return self.total_of(self.sums(), comm)

    def total_of(self, totals: Sums, comm: Communicator) -> Evaluation:
        """Return the `total` from each rank's sums."""
        comm.all_reduce(totals.counts)
        comm.all_reduce(totals.sums)
        if not self._gathers:
            return self._evaluation(totals, [])
        rows = gather_rows(totals.rows, comm)
        values = comm.broadcast_object(self._of_all(rows) if comm.rank == 0 else None)
        return self._evaluation(totals, cast("list[float]", values))

    def sums(self) -> Sums:
        """Return the sums of this rank."""
        self._count()
        return self._counted()

    def state(self) -> Values:
        """Return the sums, and the outputs not counted yet."""
        found = self._counted()
        kept = [*map(torch.cat, zip(*self._kept, strict=True))]
        return {"counts": found.counts, "sums": found.sums, "rows": list(found.rows), "kept": kept}

    def total_state(self, comm: Communicator) -> Values:
        """Return the `state` of one tally for all ranks (collective); on rank 0 it has the rows."""
        found = copy(self).sums()
        comm.all_reduce(found.counts)
        comm.all_reduce(found.sums)
        rows = list(gather_rows(found.rows, comm)) if self._gathers else []
        return {"counts": found.counts, "sums": found.sums, "rows": rows, "kept": []}

    def load_state(self, values: Values) -> None:
        """Continue from the state of an earlier tally."""
        counts = values["counts"]
        self.samples, self._labelled = int(counts[0]), float(counts[1])
        self._confusion = counts[2:].view_as(self._confusion)
        self.weight, self.loss = values["sums"][:2].tolist()
        self._sums = self._split(values["sums"])
        self._rows = [tuple(values["rows"])] if values["rows"] else []
        if values["kept"]:
            self._kept, self._pending = [tuple(values["kept"])], values["kept"][0].numel()

    def _counted(self) -> Sums:
        cells = self._confusion.flatten()
        counts = torch.cat([torch.tensor([self.samples, self._labelled], dtype=cells.dtype), cells])
        first = torch.tensor([float(self.weight), float(self.loss)], dtype=torch.float64)
        sums = torch.cat([first, *(one.cpu() for one in self._sums)])
        rows = tuple(map(torch.cat, zip(*self._rows, strict=True)))
        return Sums(counts, sums, rows)

    def _split(self, sums: Tensor) -> list[Tensor]:
        """Split the sums by metric."""
        return list(torch.split(sums[2:], [metric.width for metric in self._metrics]))

    def _count(self) -> None:
        """Count the pending outputs."""
        if not self._kept:
            return
        rows = labelled(self._ignored, *map(torch.cat, zip(*self._kept, strict=True)))
        outputs, targets, *weights = rows
        self._kept, self._pending = [], 0
        self._labelled += float(weights[0].sum()) if weights else len(targets)
        if not len(targets):
            return
        # Not in place: `here` counts on a shallow copy.
        self._sums = [
            (old if new.is_cpu else old.to(new.device)) + new
            for old, new in zip(self._sums, self._of(*rows), strict=True)
        ]
        if self._gathers:
            self._rows = [*self._rows, tuple(one.cpu() for one in rows)]
        if self._classes is not None:
            classes = predicted(outputs, targets, self._amounts).clamp(max=self._classes)
            lost = outputs.isnan()
            lost = lost.any(1) if outputs.dim() > targets.dim() else lost.reshape(targets.shape)
            classes = classes.masked_fill(lost, self._classes)
            cells = (targets * (self._classes + 1) + classes).flatten().cpu()
            each = spread(targets, *weights)[0].flatten().cpu() if weights else None
            counted = torch.bincount(cells, each, minlength=self._confusion.numel())
            self._confusion = self._confusion + counted.view_as(self._confusion)

    def _of(self, outputs: Tensor, targets: Tensor, *weights: Tensor) -> Iterator[Tensor]:
        """Yield the sums of each metric, of shape (width,); NaN if an output is."""
        lacking = outputs.isnan().any()
        for metric in self._metrics:
            yield metric.sum(outputs, targets, *weights).reshape(metric.width).masked_fill(lacking, math.nan)

    def _of_all(self, rows: tuple[Tensor, ...]) -> list[float]:
        """Compute the metrics that gather, in their order."""
        gathered = [metric for metric in self._metrics if metric.gathers]
        return [metric.of_all(*rows) if rows else math.nan for metric in gathered]

    def _evaluation(self, totals: Sums, gathered: Sequence[float]) -> Evaluation:
        """Return the figures, with the values of metrics that gather."""
        samples, labels, *cells = totals.counts.tolist()
        weight, loss = totals.sums[:2].tolist()
        given, metrics = iter(gathered), dict[str, float]()
        for metric, sums in zip(self._metrics, self._split(totals.sums), strict=True):
            if metric.gathers:
                value = next(given, None)
            else:
                value = metric.figure(sums, labels) if labels and not sums.isnan().any() else math.nan
            if value is not None:
                metrics[metric.name] = value
        mean, weighted = loss / weight if weight else math.nan, totals.counts.is_floating_point()
        return Evaluation(int(samples), mean, metrics, self._matrix(cells), weighted)

    def _matrix(self, cells: list[float]) -> list[list[float]] | None:
        if self._classes is None:
            return None
        width = self._classes + 1
        rows = [cells[start : start + width] for start in range(0, len(cells), width)]
        return rows if any(row[-1] for row in rows) else [row[:-1] for row in rows]


def evaluate(
    module: nn.Module,
    part: Part,
    comm: Communicator,
    objective: Objective,
    *,
    batch_size: int = 250,
) -> Tally:
    """Sum loss and metrics of `module` over this rank's share of `part`; `total(comm)` adds up all shares.

    Every sample counts once, at any number of ranks. The ranks' modules must have the same weights, and the
    same statistics of BatchNorm (`average_buffers`). All ranks make the same number of passes of `batch_size`
    samples, as a model held by several ranks needs all of them; the last pass may count nothing.
    """
    arithmetic, tally = objective.arithmetic, Tally(objective)
    shares = cut(len(part), comm.size)
    mine, longest = shares[comm.rank], shares[0]
    # No collective inside: virtual ranks share the gradient mode and autocast of their thread.
    with evaluating(module), torch.no_grad():
        for start in range(mine.start, mine.start + longest.stop, batch_size):
            comm.note_progress()
            stop = min(start + batch_size, mine.stop)
            counts = start < stop
            positions = (start, stop) if counts else (0, 1)
            some = torch.arange(*positions, device=part.device)
            (inputs, targets), weights = part.take(some), part.weights_of(some)
            targets = arithmetic.targets(targets)
            found = objective.compute(module, arithmetic.inputs(inputs), targets, weights)
            if counts:
                reported = arithmetic.number(found.reported)
                tally.add(reported, found.outputs, targets, found.weight, weights)
    return tally


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Put `module` into evaluation mode, and restore the modes of its parts afterwards."""
    modes = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes:
            part.training = mode


@contextmanager
def undone(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore random numbers, buffers, frozen parameters and attributes afterwards."""
    modules = list(modules)
    tensors = [tensor for module in modules for tensor in (*module.buffers(), *module.parameters())]
    # A forward pass may write to frozen parameters, such as averages.
    before = {tensor: tensor.detach().clone() for tensor in tensors if not tensor.requires_grad}
    parts = {part for module in modules for part in module.modules()}
    named = [
        attributes
        for part in parts
        for attributes in (vars(part), part._buffers)
        if isinstance(attributes, dict)
    ]
    known = [dict(attributes) for attributes in named]
    try:
        with torch.random.fork_rng(devices={tensor.device for tensor in tensors if tensor.is_cuda}):
            yield
    finally:
        for attributes, then in zip(named, known, strict=True):
            for name in attributes.keys() - then.keys():
                del attributes[name]
            attributes.update(then)
        with torch.no_grad():
            copy_all(before, before.values())


def average_buffers(replica: Replica, comm: Communicator) -> None:
    """Set the floating-point buffers of all ranks to their mean, and all others to rank 0's (collective)."""
    if comm.size == 1:
        return
    load_buffers(replica.module, mean_buffers(replica.module, comm))


def mean_buffers(module: nn.Module, comm: Communicator) -> dict[str, Tensor]:
    """Return the mean of the ranks' floating-point buffers, and rank 0's others, by name (collective).

    Sparse buffers are this rank's.
    """
    buffers = {name: buffer.clone() for name, buffer in named_buffers(module).items()}
    average([buffer for buffer in buffers.values() if buffer.layout is torch.strided], comm)
    return buffers


def average(tensors: Sequence[Tensor], comm: Communicator) -> None:
    """Set floating-point tensors to the mean over the ranks, and others to rank 0's (collective)."""
    if comm.size == 1:
        return
    broadcast_all([tensor for tensor in tensors if not tensor.is_floating_point()], comm)
    floating = [tensor for tensor in tensors if tensor.is_floating_point()]
    if floating:
        # In float64 the mean of equal float32 numbers is exactly that number: constants stay constant.
        means = torch.cat([tensor.flatten().to(device="cpu", dtype=torch.float64) for tensor in floating])
        # Sums of the largest numbers, as in masks, would be inf; dividing by a power of two is exact.
        whole = 2.0 ** comm.size.bit_length()
        comm.all_reduce(means.div_(whole))
        means.div_(comm.size).mul_(whole)
        parts = torch.split(means, [tensor.numel() for tensor in floating])
        copy_all(floating, [part.view(one.shape) for part, one in zip(parts, floating, strict=True)])


@torch.no_grad()
def load_buffers(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    """Set the buffers of a module, by name; if one is missing or has another shape, set a copy."""
    there, modules = named_buffers(module), dict(module.named_modules())
    for name, value in buffers.items():
        owner, _, own = name.rpartition(".")
        buffer = there.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (value.shape, value.dtype):
            device = value.device if buffer is None else buffer.device
            modules[owner]._buffers[own] = value.to(device, copy=True)
        # An expanded buffer cannot be written to, and is the same on all ranks.
        elif buffer.layout is not torch.strided or not torch.equal(buffer, value.to(buffer.device)):
            buffer.copy_(value)


def named_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return a module's buffers by name; for a Keras model also its frozen parameters."""
    buffers = {name: buffer.detach() for name, buffer in module.named_buffers()}
    if is_of_keras(module):
        # Keras keeps the statistics of BatchNorm in these.
        fixed = (one.detach() for one in module.parameters() if not one.requires_grad)
        buffers |= {f"keras/{n}": one for n, one in enumerate(filter(Tensor.is_floating_point, fixed))}
    return buffers


def gather_rows(rows: tuple[Tensor, ...], comm: Communicator) -> tuple[Tensor, ...]:
    """Gather tensors of shape (n, ...) on rank 0, in the order of the ranks (collective).

    A rank without rows passes an empty tuple; all ranks but rank 0 get one.
    """
    kinds = comm.all_gather_objects([(tuple(tensor.shape), tensor.dtype) for tensor in rows])
    if comm.rank:
        for tensor in rows:
            for piece in torch.split(tensor.contiguous().view(-1), PIECE):
                comm.send(piece, 0)
        return ()
    found = [rows] if rows else []
    for rank, theirs in enumerate(cast("list[list[tuple[torch.Size, torch.dtype]]]", kinds)):
        if rank and theirs:
            found.append(tuple(torch.empty(shape, dtype=dtype) for shape, dtype in theirs))
            for tensor in found[-1]:
                for piece in torch.split(tensor.view(-1), PIECE):
                    comm.recv(piece, rank)
    return tuple(map(torch.cat, zip(*found, strict=True)))
