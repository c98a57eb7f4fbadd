"""The exchange of gradients at the end of every `backward()` of a user's own loop.

    rank 0   backward │ mean of slice 0, to all rows │ clip, look, ... step
    rank 1   backward │ mean of slice 1, to all rows │ clip, look, ... step
                      A                              B

Meeting A: each rank names the parameters that have a gradient, which lies in its row of shared memory.
Barrier B: every row has the whole mean. The mean of equal averages is the same average, so gradients may
accumulate. `torch.autograd.grad` exchanges nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import torch
from torch import Tensor, nn

from tutti.comm.base import Communicator
from tutti.errors import BadModel, BadOption
from tutti.optim.sparse import sparse_tables
from tutti.own_loop.meetings import Meetings, Purpose
from tutti.replica import ALIGNMENT, Flat, Replica, stretch_like

PIECE = 1 << 16
"""Elements averaged at a time: they are still in the cache when all rows get the mean."""


@dataclass(frozen=True)
class Cell:
    """The place where one parameter's gradient is exchanged."""

    parameter: nn.Parameter
    view: Tensor  # its place in this rank's row, in its shape
    flat: int  # the number of its vector
    span: slice  # its place in the vector
    sparse: bool  # whether its gradient has only rows of an embedding table

    @cached_property
    def address(self) -> int:
        """Of the view."""
        return self.view.data_ptr()

    def holds(self, gradient: Tensor) -> bool:
        """Return whether a gradient is stored in this cell."""
        return (
            not gradient.is_sparse
            and gradient.data_ptr() == self.address
            and gradient.stride() == self.view.stride()  # not so what is transposed
            and gradient.dtype == self.view.dtype
        )


class GradientExchange:
    """The exchange of the gradients of all distributed models."""

    def __init__(self, comm: Communicator) -> None:
        self._comm, self.meetings = comm, Meetings(comm)
        self._lanes = 1
        self._cross = comm.cross if comm.hosts > 1 else None
        self._flats: list[Flat] = []
        self._cells: list[Cell] = []
        self._known: set[int] = set()
        self._touched: dict[int, None] = {}
        self._task = -1
        # By cells: this rank's part of the rows, each piece a view of every row; the cells not in the rows.
        self._plans: dict[tuple[int, ...], tuple[list[tuple[Tensor, ...]], list[Cell]]] = {}

    def add(self, replica: Replica) -> None:
        """Exchange the gradients of another model, too (collective)."""
        # The k-th ranks of all hosts own the k-th slice together; ranks that some host lacks own none.
        self._lanes = min(cast("list[int]", self._comm.all_gather_objects(self._comm.node.size)))
        tables = {id(table) for table in sparse_tables(replica.module)}
        for flat in replica.flats:
            for parameter, span in zip(flat.parameters, flat.spans, strict=True):
                view = stretch_like(flat.grads, span, parameter)
                self._watch(len(self._cells), parameter)
                self._cells.append(Cell(parameter, view, len(self._flats), span, id(parameter) in tables))
            self._flats.append(flat)
        self._known = {id(cell.parameter) for cell in self._cells}
        self.meetings.widen(len(self._cells))

    def knows(self, parameter: nn.Parameter) -> bool:
        """Return whether the gradient of a parameter is exchanged."""
        return id(parameter) in self._known

    def refuse_step_inside(self) -> None:
        """Refuse a step before the end of a backward pass."""
        if self._touched:
            raise BadOption(
                "the optimizer is stepped before the backward pass has ended (in a hook, or after one that "
                "failed), but the ranks exchange gradients at its end; call step() after backward()"
            )

    def _watch(self, number: int, parameter: nn.Parameter) -> None:
        trained = parameter.requires_grad
        parameter.requires_grad_(True)

        def arrived(_: Tensor) -> None:
            self._touched[number] = None
            # A pass that failed has not reached its end: each pass asks for its own.
            task = torch._C._current_graph_task_id()
            if task != self._task:
                self._task = task
                torch.autograd.Variable._execution_engine.queue_callback(self._end)

        handle = cast("Any", parameter).register_post_accumulate_grad_hook(arrived)
        # Before the program's hooks, which may step.
        cast("Any", parameter)._post_accumulate_grad_hooks.move_to_end(handle.id, last=False)
        parameter.requires_grad_(trained)

    def _end(self) -> None:
        self._task = -1
        # Gradients of a pass that failed may have been set to None since.
        cells = [(number, self._cells[number].parameter.grad) for number in sorted(self._touched)]
        self._touched.clear()
        touched = tuple(number for number, gradient in cells if gradient is not None)
        if any(gradient is not None and gradient.requires_grad for _, gradient in cells):
            raise BadOption(
                "backward(create_graph=True) keeps a graph behind the gradients, which ends where those "
                "of other ranks come in; use torch.autograd.grad(..., create_graph=True) for a penalty, "
                "or one rank"
            )
        if not touched:
            return
        self._bring(touched)
        table = self.meetings.come(Purpose.REDUCE, touched=touched)
        if table is None:
            self._reduce(touched)
            return
        wanted = tuple(cast("list[int]", table.any(dim=0).nonzero().view(-1).tolist()))
        self._bring([number for number in wanted if number not in touched])
        self._comm.barrier()
        self._reduce(wanted)

    def _bring(self, numbers: Sequence[int]) -> None:
        """Put this rank's gradients of these cells into its row; zero where it has none."""
        views, gradients = list[Tensor](), list[Tensor]()
        for cell in map(self._cells.__getitem__, numbers):
            gradient = cell.parameter.grad
            if cell.sparse or (gradient is not None and cell.holds(gradient)):
                continue
            if cell.parameter.dtype != cell.view.dtype:
                raise BadModel(
                    f"a parameter of shape {tuple(cell.parameter.shape)} was converted from "
                    f"{cell.view.dtype} to {cell.parameter.dtype} after distribute(); convert it before"
                )
            if gradient is None:
                cell.view.zero_()
            else:
                views.append(cell.view)
                gradients.append(gradient.to_dense() if gradient.is_sparse else gradient)
            # Not the cell's view itself: converting a module exchanges what its gradients hold.
            cell.parameter.grad = cell.view.detach()
        if views:
            torch._foreach_copy_(views, gradients)

    def _reduce(self, numbers: tuple[int, ...]) -> None:
        """Give these cells' parameters the mean over all ranks, bit-equal on all of them (collective)."""
        plan = self._plans.get(numbers)
        if plan is None:
            cells = [self._cells[number] for number in numbers]
            dense, sparse = [c for c in cells if not c.sparse], [c for c in cells if c.sparse]
            plan = self._plans[numbers] = list(self._pieces(dense)), sparse
        share = 1 / self._comm.size
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
        self._comm.node.barrier()

    def _pieces(self, dense: Sequence[Cell]) -> Iterator[tuple[Tensor, ...]]:
        # Across hosts a slice is one message; inside one, what fits the cache.
        length = PIECE if self._cross is None else None
        for flat, place in own_stretches(self._flats, dense, self._lanes, self._comm.node.rank):
            step = length or place.stop - place.start
            for start in range(place.start, place.stop, step):
                stop = min(start + step, place.stop)
                yield tuple(row[start:stop] for row in self._flats[flat].rows)

    def _reduce_rows(self, parameter: nn.Parameter) -> None:
        """Average the touched rows of a table; a row is touched if it is on any rank."""
        own = parameter.grad
        if own is not None and not own.is_sparse:
            own = own.to_sparse(1)
        mine = None if own is None else (own.coalesce().indices(), own.coalesce().values())
        brought = cast("list[tuple[Tensor, Tensor] | None]", self._comm.all_gather_objects(mine))
        parts = [part for part in brought if part is not None]
        parameter.grad = torch.sparse_coo_tensor(
            torch.cat([indices for indices, _ in parts], dim=1),
            torch.cat([values for _, values in parts]) / self._comm.size,
            parameter.shape,
            check_invariants=False,
        ).coalesce()


def own_stretches(
    flats: Sequence[Flat], cells: Sequence[Cell], parts: int, part: int
) -> Iterator[tuple[int, slice]]:
    """Cut the stretches that some cells cover into shares of about equal length, and yield this rank's.

    Yield the number of a vector, and a stretch of it, including the gap behind a parameter.
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
