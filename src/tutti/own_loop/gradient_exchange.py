"""The exchange of gradients at the end of every `backward()` of a user's own loop.

    backward()   hooks note which parameters have got something; the last thing that it does: meet, reduce
    step()       meet; ranks that still reduce are helped first

Ranks may differ in what they do: one may have no use for a head of the model, or leave a batch out.

Hooks of the program's on parameters are called by torch while `backward()` goes on, when a rank has its own
part of the gradient alone. Where `torch.autograd.grad` asks for a parameter's gradient nothing is exchanged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.own_loop.meetings import HEAD, Meetings, Purpose
from tutti.strategies.joint_gradients import Cell, Incoming, JointGradients


@dataclass
class ExchangedModel:
    """A model whose gradients are exchanged.

    Attributes:
        gradients: of this rank.
        first: the number of its first cell among those of all models.
        sums: losses are sums over samples, not means.
        share: the weight of this rank's gradients.
        before: the parameters' gradients before the backward pass under way, which are taken aside if what
            it brings is to be weighted or noted; None: they are in their places.
    """

    gradients: JointGradients
    first: int
    sums: bool
    share: float = 1.0
    before: list[Tensor | None] | None = None

    @property
    def is_apart(self) -> bool:
        """True if what a backward pass brings is wanted apart from what was there before."""
        return self.share != 1 or self.gradients.records


class GradientExchange:
    """The exchange of gradients: those of distributed models become those of all ranks as `backward()` ends.

    Attributes:
        meetings: of the ranks.
        passes: how many backward passes of this rank have brought gradients since the last step.
        made: how many have since the beginning.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm, self.passes, self.made = comm, 0, 0
        self.meetings = Meetings(comm)
        self._models: list[ExchangedModel] = []
        self._cells: list[Cell] = []
        self._known: set[int] = set()
        self._touched: dict[int, None] = {}
        self._task = -1

    def add(self, model: JointGradients, sums: bool = False) -> None:
        """Exchange the gradients of another model, too (collective): their mean over the samples, or sum."""
        one = ExchangedModel(model, len(self._cells), sums)
        self._models.append(one)
        self._cells.extend(model.cells)
        self._known.update(id(cell.parameter) for cell in model.cells)
        for number, cell in enumerate(model.cells, one.first):
            self._watch(number, cell.parameter)
        self.meetings.widen(len(self._cells))

    def knows(self, parameter: nn.Parameter) -> bool:
        """Return whether the gradient of a parameter is exchanged."""
        return id(parameter) in self._known

    def weigh(self, own: int, whole: int) -> None:
        """Weigh this rank's gradients from now on by its `own` samples among the `whole` batch's."""
        size = self._comm.size
        for one in self._models:
            # Gradients are averaged over the ranks, so that of a share n_i / n counts size * n_i / n.
            one.share = float(size if own else 0) if one.sums else size * own / whole if whole else 0.0
            one.gradients.share = own / whole if whole else 0.0

    def begin(self) -> None:
        """Begin a backward pass."""
        for one in self._models:
            if one.is_apart:
                one.before = [cell.parameter.grad for cell in one.gradients.cells]
                for cell in one.gradients.cells:
                    cell.parameter.grad = None

    def end(self, failed: bool = True) -> None:
        """Add what a backward pass has brought, weighted, to what was there before."""
        for one in self._models:
            before, one.before = one.before or (), None
            for at, (cell, earlier) in enumerate(zip(one.gradients.cells, before, strict=False)):
                parameter, new = cell.parameter, cell.parameter.grad
                if new is None:
                    parameter.grad = earlier
                    continue
                new = new * one.share if one.share else torch.zeros_like(new)
                if one.gradients.records and not failed:
                    one.gradients.incoming[at] = Incoming(new, earlier)
                    parameter.grad = new if earlier is None else earlier
                elif earlier is None or (earlier.is_sparse and not new.is_sparse):
                    parameter.grad = new if earlier is None else new + earlier
                else:
                    parameter.grad = earlier.add_(new)

    def meet(self, purpose: Purpose, details: Sequence[int] = (), touched: Sequence[int] = ()) -> Tensor:
        """Wait for all ranks, as `Meetings.come` does (collective); those that reduce are helped first.

        Returns:
            Every rank's words, (ranks, words); empty if all are this rank's.

        Raises:
            BadOption: the step is inside of a `backward()`.
        """
        if self._touched and purpose is Purpose.STEP:
            raise BadOption(
                "the optimizer is stepped before the backward pass has ended (in a hook, or after one that "
                "failed), but the ranks exchange gradients at its end; call step() after backward()"
            )
        while True:
            table = self.meetings.come(purpose, details, touched)
            if table is None:
                if purpose is Purpose.REDUCE:
                    self._reduce(touched)
                return torch.empty(0)
            if not bool((table[:, 0] == Purpose.REDUCE).any()):
                return table
            self._help(table, touched)
            if purpose is Purpose.REDUCE:
                return torch.empty(0)

    def _watch(self, number: int, parameter: nn.Parameter) -> None:
        trained = parameter.requires_grad
        parameter.requires_grad_(True)

        def arrived(_: Tensor) -> None:
            self._touched[number] = None
            # The last thing that a pass does. One that failed has not come to its end: each asks for its own.
            task = torch._C._current_graph_task_id()
            if task != self._task:
                self._task = task
                torch.autograd.Variable._execution_engine.queue_callback(self._end)

        handle = cast("Any", parameter).register_post_accumulate_grad_hook(arrived)
        # Before those of the program's, which may step.
        cast("Any", parameter)._post_accumulate_grad_hooks.move_to_end(handle.id, last=False)
        parameter.requires_grad_(trained)

    def _end(self) -> None:
        self._task = -1
        numbers = list(self._touched)
        self._touched.clear()
        for number in numbers:
            gradient = self._cells[number].parameter.grad
            if gradient is not None and gradient.requires_grad:
                raise BadOption(
                    "backward(create_graph=True) keeps a graph behind the gradients, which ends where those "
                    "of other ranks come in; use torch.autograd.grad(..., create_graph=True) for a penalty, "
                    "or one rank"
                )
        self.end(failed=False)
        # What a pass that failed has brought may have been zeroed since.
        touched = tuple(n for n in numbers if self._cells[n].parameter.grad is not None)
        if touched:
            self.passes += 1
            self.made += 1
            self._bring(touched)
            self.meet(Purpose.REDUCE, (), touched)
        self.begin()  # this may have been the pass of a checkpoint inside of another, which goes on

    def _bring(self, numbers: Sequence[int]) -> None:
        for one, own in self._by_model(numbers):
            one.gradients.bring(own)

    def _reduce(self, numbers: Sequence[int]) -> None:
        for one, own in self._by_model(numbers):
            one.gradients.reduce(own)

    def _by_model(self, numbers: Sequence[int]) -> list[tuple[ExchangedModel, list[int]]]:
        """The models that have some cells, each with its own numbers of them."""
        if len(self._models) == 1:
            return [(self._models[0], list(numbers))]
        parts = []
        for one in self._models:
            own = [n - one.first for n in numbers if 0 <= n - one.first < len(one.gradients.cells)]
            if own:
                parts.append((one, own))
        return parts

    def _help(self, table: Tensor, touched: Sequence[int]) -> None:
        """Reduce what any rank brings; this one has brought `touched`, and brings what it has of the rest."""
        wanted = _numbers_of(table[table[:, 0] == Purpose.REDUCE])
        known = set(touched)
        self._bring([number for number in wanted if number not in known])
        self._comm.barrier()
        self._reduce(wanted)


def _numbers_of(table: Tensor) -> list[int]:
    """The parameters that ranks bring, by their rows of words."""
    return cast("list[int]", table[:, HEAD:].any(dim=0).nonzero().view(-1).tolist())
