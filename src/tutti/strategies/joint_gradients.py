"""Gradients of one model on several ranks, reduced as soon as each rank has its own.

In a loop that the user writes, what lies between `backward()` and `step()` is the user's: clipping, scaling,
looking at gradients. So there the exchange is at the end of `backward()`, and every rank gets the whole of
its result:

    rank 0   backward │ mean of slice 0, to all rows │ clip, look, ... step
    rank 1   backward │ mean of slice 1, to all rows │ clip, look, ... step
                      A                              B

Barrier A: every rank's gradient is in its row. Barrier B: every row has the whole mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast
from weakref import ref

import torch
from torch import Tensor, nn
from typing_extensions import override

from tutti.allreduce.base import GradientLayout, GradientReduction
from tutti.comm.base import Communicator
from tutti.errors import BadModel
from tutti.optim.sharded import equal_slices
from tutti.optim.sparse import sparse_tables
from tutti.replica import ALIGNMENT, Flat, Replica, is_there, stretch_like
from tutti.state import Values

MakeReduction = Callable[[Communicator, GradientLayout], GradientReduction]
"""Makes a reduction of vectors of a layout over the ranks of a communicator."""

PIECE = 1 << 16
"""Elements that are averaged at a time: they are still in the cache when all rows get the mean."""


@dataclass(frozen=True)
class Cell:
    """The place where one parameter's gradient is exchanged.

    Attributes:
        parameter: the module's own.
        view: its place in this rank's row, in its shape.
        flat: the number of its vector.
        span: where it lies there.
        sparse: whether its gradient is one of rows of an embedding table.
    """

    parameter: nn.Parameter
    view: Tensor
    flat: int
    span: slice
    sparse: bool

    @cached_property
    def address(self) -> int:
        """Of the view."""
        return self.view.data_ptr()

    def holds(self, gradient: Tensor) -> bool:
        """Tell whether a gradient is stored in this cell."""
        return (
            not gradient.is_sparse
            and is_there(gradient, self.view, self.address)
            and gradient.dtype == self.view.dtype
        )


@dataclass
class Incoming:
    """A parameter's gradient from one `backward()`.

    Attributes:
        gradient: of this rank.
        before: the parameter's gradient as it was before; None where there was none.
    """

    gradient: Tensor
    before: Tensor | None


class JointGradients(ABC):
    """The gradients of one model on all ranks.

    Attributes:
        cells: one for each parameter.
        records: whether the gradients that `backward()` brings are wanted in `incoming`, apart from those
            that they are added to.
        incoming: by number of the cell.
        share: which part of the batch's samples is this rank's, 0 to 1.
    """

    records = False

    def __init__(self, replica: Replica, comm: Communicator) -> None:
        self.comm, self.flats = comm, replica.flats
        tables = {id(table) for table in sparse_tables(replica.module)}
        self.cells = tuple(
            Cell(parameter, stretch_like(flat.grads, span, parameter), number, span, id(parameter) in tables)
            for number, flat in enumerate(replica.flats)
            for parameter, span in zip(flat.parameters, flat.spans, strict=True)
        )
        self.incoming: dict[int, Incoming] = {}
        self.share = 1 / comm.size

    def forget(self) -> None:
        """Drop what is remembered of earlier gradients, as the weights of that time have been replaced."""
        return

    def state(self) -> list[Values]:
        """Return what is remembered of earlier gradients."""
        return []

    def load_state(self, values: list[Values]) -> None:
        """Go on with what `state` has returned."""
        return

    def unseen(self) -> list[Cell]:
        """Find the cells whose parameter has a gradient that is not the result of an exchange."""
        return [
            cell
            for number, cell in enumerate(self.cells)
            if not cell.sparse
            and cell.parameter.grad is not None
            and cell.parameter.grad is not self._result(number)
        ]

    @abstractmethod
    def _result(self, number: int) -> Tensor | None:
        """Return the gradient of a cell's parameter that the last exchange has made."""

    @abstractmethod
    def bring(self, numbers: Sequence[int]) -> None:
        """Put what this rank has of these cells where the exchange finds it; zero where it has nothing."""

    @abstractmethod
    def reduce(self, numbers: Sequence[int]) -> None:
        """Give these cells' parameters the gradient of all ranks (collective), after all have brought theirs.

        It is bit-equal on all ranks, and nobody reads another's row any more when this returns.
        """


class MeanGradients(JointGradients):
    """The mean over the ranks, formed where the gradients lie.

    The mean of what was averaged before is itself: so gradients that are added to earlier ones need no care.
    """

    def __init__(self, replica: Replica, comm: Communicator) -> None:
        super().__init__(replica, comm)
        self._lanes = lanes_of(comm)
        self._cross = comm.cross if comm.hosts > 1 else None
        self._rows = [flat.rows.unbind() for flat in self.flats]
        # By cells: this rank's part of the rows, each piece a view of every row; the cells not in the rows.
        self._plans: dict[tuple[int, ...], tuple[list[tuple[Tensor, ...]], list[Cell]]] = {}
        self._out: dict[int, ref[Tensor]] = {}

    @override
    def _result(self, number: int) -> Tensor | None:
        held = self._out.get(number)
        return None if held is None else held()

    @override
    def bring(self, numbers: Sequence[int]) -> None:
        views, gradients = list[Tensor](), list[Tensor]()
        for number in numbers:
            cell = self.cells[number]
            gradient = cell.parameter.grad
            if cell.sparse or (gradient is not None and cell.holds(gradient)):
                continue
            if cell.parameter.dtype != cell.view.dtype:
                raise BadModel(
                    f"a parameter of shape {tuple(cell.parameter.shape)} was converted from "
                    f"{cell.view.dtype} to {cell.parameter.dtype} after distribute(); convert it before"
                )
            self._release(number)
            if gradient is None:
                cell.view.zero_()
            else:
                views.append(cell.view)
                gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
            # Not the cell's view itself: converting a module exchanges what its gradients hold.
            out = cell.view.detach()
            cell.parameter.grad, self._out[number] = out, ref(out)
        if views:
            torch._foreach_copy_(views, gradients)

    def _release(self, number: int) -> None:
        """Give the gradient that lay in this rank's row memory of its own, if the loop still holds it."""
        last = self._out.pop(number, None)
        held = None if last is None else last()
        if held is not None:
            held.data = held.clone()

    @override
    def reduce(self, numbers: Sequence[int]) -> None:
        key = tuple(numbers)
        plan = self._plans.get(key)
        if plan is None:
            cells = [self.cells[number] for number in numbers]
            dense, sparse = [c for c in cells if not c.sparse], [c for c in cells if c.sparse]
            plan = self._plans[key] = list(self._pieces(dense)), sparse
        share = 1 / self.comm.size
        for total, *others in plan[0]:
            for other in others:  # in the order of ranks, so that the sum is the same in every run
                total.add_(other)
            if self._cross is not None:
                self._cross.all_reduce(total)
            total.mul_(share)
            for other in others:
                other.copy_(total)
        for cell in plan[1]:
            self._reduce_rows(cell.parameter)
        self.comm.node.barrier()

    def _pieces(self, dense: Sequence[Cell]) -> Iterator[tuple[Tensor, ...]]:
        # Across hosts a slice is one message; inside one, what fits the cache.
        length = PIECE if self._cross is None else None
        for flat, place in own_stretches(self.flats, dense, self._lanes, self.comm.node.rank):
            step = length or place.stop - place.start
            for start in range(place.start, place.stop, step):
                stop = min(start + step, place.stop)
                yield tuple(row[start:stop] for row in self._rows[flat])

    def _reduce_rows(self, parameter: nn.Parameter) -> None:
        """Average the touched rows of a table; a row is touched if it is on any rank."""
        own = parameter.grad
        if own is not None and not own.is_sparse:
            own = own.to_sparse(1)
        mine = None if own is None else (own.coalesce().indices(), own.coalesce().values())
        brought = cast("list[tuple[Tensor, Tensor] | None]", self.comm.all_gather_objects(mine))
        parts = [part for part in brought if part is not None]
        parameter.grad = torch.sparse_coo_tensor(
            torch.cat([indices for indices, _ in parts], dim=1),
            torch.cat([values for _, values in parts]) / self.comm.size,
            parameter.shape,
            check_invariants=False,
        ).coalesce()


class ReducedGradients(JointGradients):
    """Gradients reduced after each `backward()`: compressed, adaptive, or by another algorithm.

    Reductions may remember what they left out, and need not be linear: so they get whole vectors, of what is
    new alone, and their result is added to what was there before.

    Args:
        between: it acts between hosts, on sums that each host forms of its ranks' gradients; else on the
            gradients of all ranks.
        whole: no parameter may be cut between the ranks of a host.
    """

    records = True

    def __init__(
        self, replica: Replica, comm: Communicator, make: MakeReduction, between: bool, whole: bool = False
    ) -> None:
        super().__init__(replica, comm)
        self._out: dict[int, Tensor] = {}
        over = comm.cross if between else comm
        lanes, lane = (lanes_of(comm), comm.node.rank) if between else (1, 0)
        self._pieces: list[list[Tensor]] = []
        self._reductions: list[GradientReduction] = []
        for flat in self.flats if lane < lanes else ():
            own = equal_slices(flat, lanes, whole)[lane]
            if own.start < own.stop:
                self._pieces.append([row[own] for row in (flat.rows if between else [flat.grads])])
                if over is not None and over.size > 1:
                    self._reductions.append(make(over, GradientLayout.of(flat, own)))

    @override
    def forget(self) -> None:
        for reduction in self._reductions:
            reduction.forget()

    @override
    def state(self) -> list[Values]:
        return [reduction.state() for reduction in self._reductions]

    @override
    def load_state(self, values: list[Values]) -> None:
        for reduction, one in zip(self._reductions, values, strict=True):
            reduction.load_state(one)

    @override
    def _result(self, number: int) -> Tensor | None:
        return self._out.get(number)

    @override
    def bring(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            if number in self.incoming:
                gradient = self.incoming[number].gradient
                dense = gradient.to_dense() if gradient.is_sparse else gradient
                torch.mul(dense, 1 / self.comm.size, out=self.cells[number].view)

    @override
    def reduce(self, numbers: Sequence[int]) -> None:
        for total, *others in self._pieces:
            for other in others:
                total.add_(other)
        for (total, *_), reduction in zip(self._pieces, self._reductions, strict=False):
            reduction.all_reduce(total, self.share)
        for total, *others in self._pieces:
            for other in others:
                other.copy_(total)
        self.comm.node.barrier()
        for number in numbers:
            self._add(number)
        for flat in self.flats:
            flat.grads.zero_()
        self.incoming.clear()

    def _add(self, number: int) -> None:
        """Add the result to what the parameter had before, the same way on all ranks."""
        cell, new = self.cells[number], self.incoming.get(number)
        before = cell.parameter.grad if new is None else new.before
        cell.parameter.grad = cell.view.clone() if before is None else before.add(cell.view)
        self._out[number] = cell.parameter.grad


def lanes_of(comm: Communicator) -> int:
    """Return how many slices all hosts cut a vector into (collective).

    The k-th ranks of all hosts own the k-th slice together; a rank that some host lacks owns none.
    """
    return min(node_sizes(comm))


def node_sizes(comm: Communicator) -> list[int]:
    """Return for each rank how many there are on its host (collective)."""
    return cast("list[int]", comm.all_gather_objects(comm.node.size))


def own_stretches(
    flats: Sequence[Flat], cells: Sequence[Cell], parts: int, part: int
) -> Iterator[tuple[int, slice]]:
    """Cut the stretches that some cells cover into shares of about equal length, and yield this rank's.

    Yields:
        The number of a vector, and a stretch of it; with the gap behind a parameter.
    """
    stretches: list[tuple[int, int, int]] = []
    for cell in sorted(cells, key=lambda cell: (cell.flat, cell.span.start)):
        stop = min(-(-cell.span.stop // ALIGNMENT) * ALIGNMENT, len(flats[cell.flat].weights))
        if stretches and stretches[-1][0] == cell.flat and stretches[-1][2] == cell.span.start:
            stretches[-1] = (cell.flat, stretches[-1][1], stop)
        else:
            stretches.append((cell.flat, cell.span.start, stop))
    lines = sum(-(-(stop - start) // ALIGNMENT) for _, start, stop in stretches)
    first, last = (lines * edge // parts * ALIGNMENT for edge in (part, part + 1))
    at = 0
    for flat, start, stop in stretches:
        begin, end = max(start, start + first - at), min(stop, start + last - at)
        if begin < end:
            yield flat, slice(begin, end)
        at += -(-(stop - start) // ALIGNMENT) * ALIGNMENT
