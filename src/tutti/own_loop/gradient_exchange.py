"""The exchange of gradients at the end of every `backward()` of a user's own loop.

    backward()   hooks note which parameters have got something; the last thing that it does: meet, reduce
    step()       meet; ranks that still reduce are helped first

Ranks may differ in what they do: one may have no use for a head of the model, or leave a batch out.

torch calls hooks of the program's while `backward()` goes on, when a rank has only its own part of the
gradient. So it finds ours in their place, and the program's are called at the end, after the exchange:

    register_hook                        with what this pass has brought, which they may replace
    register_post_accumulate_grad_hook   with the parameter, whose gradient is added up

Where `torch.autograd.grad` asks for a parameter's gradient nothing is exchanged, and hooks see this rank's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast
from zlib import crc32

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.own_loop.meetings import HEAD, Meetings, Purpose
from tutti.strategies.joint_gradients import Cell, Incoming, JointGradients

REDUCING: Final = (Purpose.REDUCE, Purpose.AGREE)

Hook = Callable[[Any], Any]
"""A function that either of the two methods registers."""

OURS: Final = -1
"""The key of our own hook; torch's count from 0."""


@dataclass
class ExchangedModel:
    """A model whose gradients are exchanged.

    Attributes:
        gradients: of this rank.
        first: the number of its first cell among those of all models.
        sums: losses are sums over samples, not means.
        share: the weight of this rank's gradients.
    """

    gradients: JointGradients
    first: int
    sums: bool
    share: float = 1.0


class GradientExchange:
    """The exchange of gradients: those of distributed models become those of all ranks as `backward()` ends.

    Attributes:
        meetings: of the ranks.
        passes: how many backward passes of this rank have brought gradients since the last step.
        unused: no backward pass has come since the weights of samples were set last.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm, self.passes, self.unused = comm, 0, False
        self.meetings = Meetings(comm)
        self._models: list[ExchangedModel] = []
        self._cells: list[Cell] = []
        # By the id of its object, what torch has of a parameter: the tensor that backward() knows.
        self._inside: dict[int, int] = {}
        self._nodes: list[Any] = []
        self._hooks: list[LateHooks] = []
        self._touched: dict[int, None] = {}
        self._task = -1
        self._handles: dict[int, Any] = {}

    def add(self, model: JointGradients, sums: bool = False) -> None:
        """Exchange the gradients of another model, too (collective): their mean over the samples, or sum."""
        one = ExchangedModel(model, len(self._cells), sums)
        self._models.append(one)
        self._cells.extend(model.cells)
        self._inside.update((id(cell.parameter), cell.parameter._cdata) for cell in model.cells)
        for number, cell in enumerate(model.cells, one.first):
            self._watch(number, cell.parameter)
            if model.records:
                self._weigh(one, number)
        self.meetings.widen(len(self._cells))

    def knows(self, parameter: nn.Parameter) -> bool:
        """Return whether the gradient of a parameter is exchanged."""
        return id(parameter) in self._inside

    def refuse_swapped(self, parameters: Iterable[nn.Parameter]) -> None:
        """Refuse parameters that have become other tensors, of which our hooks do not know.

        Raises:
            BadOption: one has.
        """
        for parameter in parameters:
            if self._inside.get(id(parameter), parameter._cdata) != parameter._cdata:
                raise BadOption(
                    f"a parameter of shape {tuple(parameter.shape)} was swapped for another tensor after "
                    "distribute(), by torch.utils.swap_tensors or with "
                    "torch.__future__.set_swap_module_params_on_conversion, so that its gradient is not "
                    "exchanged; swap before distribute(), or copy: parameter.copy_(other)"
                )

    def weigh(self, own: int, whole: int) -> None:
        """Weigh this rank's gradients from now on by its `own` samples among the `whole` batch's."""
        size, self.unused = self._comm.size, True
        for one in self._models:
            model = one.gradients
            # Gradients are averaged over the ranks, so that of a share n_i / n counts size * n_i / n.
            share = float(size if own else 0) if one.sums else size * own / whole if whole else 0.0
            model.share = own / whole if whole else 0.0
            if share == one.share == 1 and not model.records:
                continue
            one.share = share
            for number in range(one.first, one.first + len(model.cells)):
                if share != 1 or model.records:
                    self._weigh(one, number)
                else:
                    self._handles.pop(number).remove()

    @torch.no_grad()
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
                    self._call_hooks(touched)
                return torch.empty(0)
            if not bool((table[:, 0] <= Purpose.AGREE).any()):
                return table
            if purpose is Purpose.AGREE:
                for one, own in self._by_model(touched):
                    one.gradients.bring_set(own, one.share)
            self._help(table, touched)
            if purpose in REDUCING:
                return torch.empty(0)

    @torch.no_grad()
    def bring_unseen(self) -> None:
        """Reduce gradients that no `backward()` has made, but the loop has set (collective).

        Those that are the same on all ranks are left as they are.
        """
        unseen = tuple(one.first + at for one in self._models for at in one.gradients.unseen())
        if unseen:
            self.meet(Purpose.AGREE, [self._checksum(unseen)], unseen)

    def _checksum(self, numbers: Sequence[int]) -> int:
        check = 0
        for number in numbers:
            gradient = self._cells[number].parameter.grad
            assert gradient is not None, "the loop has set it"
            values = gradient.coalesce().values() if gradient.is_sparse else gradient
            check = crc32(values.contiguous().view(-1).view(torch.uint8).numpy().tobytes(), check)
        return check

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

        self._hooks.append(LateHooks(parameter, arrived))
        self._nodes.append(adder(parameter))
        parameter.requires_grad_(trained)

    def _weigh(self, one: ExchangedModel, number: int) -> None:
        """Weigh, and note, what comes for a parameter, before it is added to what is there.

        Only gradients that are added to `.grad` come here, not those that `torch.autograd.grad` returns.
        """
        node = adder(self._cells[number].parameter)
        if number in self._handles and node is self._nodes[number]:
            return
        self._nodes[number] = node
        model, at = one.gradients, number - one.first
        parameter = model.cells[at].parameter

        def before(gradients: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            (gradient,) = gradients
            if one.share != 1:
                gradient = gradient * one.share if one.share else torch.zeros_like(gradient)
            if model.records:
                known = model.incoming.get(at)
                # Without a gradient it is what is left of a pass that has failed.
                if known is not None and parameter.grad is not None:
                    known.gradient = known.gradient + gradient.detach()
                else:
                    kept = None if parameter.grad is None else parameter.grad.clone()
                    model.incoming[at] = Incoming(gradient.detach(), kept)
            return (gradient,)

        self._handles[number] = self._nodes[number].register_prehook(before)

    @torch.no_grad()
    def _end(self) -> None:
        self._task, self.unused = -1, False
        # What a pass that failed has brought may have been zeroed since.
        touched = tuple(n for n in self._touched if self._cells[n].parameter.grad is not None)
        self._touched.clear()
        if not touched:
            return
        for number in touched:
            gradient = self._cells[number].parameter.grad
            if gradient is not None and gradient.requires_grad:
                raise BadOption(
                    "backward(create_graph=True) keeps a graph behind the gradients, which ends where those "
                    "of other ranks come in; use torch.autograd.grad(..., create_graph=True) for a penalty, "
                    "or one rank"
                )
        self._refuse_sums_with_set([number for number in touched if self._hooks[number].adding])
        self.passes += 1
        self._bring(touched)
        self.meet(Purpose.REDUCE, (), touched)

    def _refuse_sums_with_set(self, numbers: Sequence[int]) -> None:
        """Refuse gradients of which hooks are to see a part only, and the rest differs between ranks."""
        for one, own in self._by_model(numbers) if numbers else ():
            for number in set(own).intersection(one.gradients.unseen()):
                shape = tuple(one.gradients.cells[number].view.shape)
                raise BadOption(
                    f"backward() adds to a gradient of shape {shape} that the loop has set, and a hook of "
                    "register_hook is to see what it adds; step, or set gradients to zero, in between"
                )

    def _bring(self, numbers: Sequence[int]) -> None:
        for one, own in self._by_model(numbers):
            one.gradients.bring(own)

    def _reduce(self, numbers: Sequence[int]) -> None:
        for one, own in self._by_model(numbers):
            one.gradients.reduce(own)

    def _call_hooks(self, numbers: Sequence[int]) -> None:
        """Call the program's hooks behind gradients of a backward pass, in one order on all ranks."""
        watched = [number for number in numbers if self._hooks[number]]
        for number in sorted(watched, reverse=True):
            self._hooks[number].call()

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

    @torch.no_grad()
    def _help(self, table: Tensor, touched: Sequence[int]) -> None:
        """Reduce what any rank brings; this one has brought `touched`, and brings what it has of the rest."""
        wanted = _numbers_of(table[table[:, 0] <= Purpose.AGREE])
        passed = _numbers_of(table[table[:, 0] == Purpose.REDUCE])
        known = set(touched)
        for number in passed:
            self._hooks[number].note()
        self._bring([number for number in wanted if number not in known])
        self._comm.barrier()
        self._reduce(wanted)
        self._call_hooks(passed)


def _numbers_of(table: Tensor) -> list[int]:
    """The parameters that ranks bring, by their rows of words."""
    return cast("list[int]", table[:, HEAD:].any(dim=0).nonzero().view(-1).tolist())


class HookRegistry(OrderedDict[int, Hook]):
    """The hooks of one kind on a parameter, of which torch calls only ours.

    Args:
        known: those that are registered already. What takes them out again holds this very dictionary.
        ours: is called once there are others.

    Attributes:
        others: the program's.
    """

    def __init__(self, known: dict[int, Hook] | None, ours: Hook) -> None:
        super().__init__()
        self._ours = ours
        self.others: dict[int, Hook] = OrderedDict() if known is None else known
        if self.others:
            self.call_ours()

    def call_ours(self) -> None:
        """Have torch call ours from now on."""
        super().__setitem__(OURS, self._ours)

    @override
    def __setitem__(self, key: int, hook: Hook) -> None:
        self.others[key] = hook
        self.call_ours()

    @override
    def __contains__(self, key: object) -> bool:
        return key in self.others

    @override
    def __delitem__(self, key: int) -> None:
        del self.others[key]


class LateHooks:
    """All of the program's hooks on the gradient of one parameter; `arrived` is ours, behind its sum."""

    def __init__(self, parameter: nn.Parameter, arrived: Callable[[Tensor], None]) -> None:
        self._parameter = parameter
        self._on_gradient = HookRegistry(parameter._backward_hooks, self._see)
        self._behind = HookRegistry(getattr(parameter, "_post_accumulate_grad_hooks", None), arrived)
        self._behind.call_ours()
        parameter._backward_hooks = self._on_gradient
        parameter._post_accumulate_grad_hooks = self._behind
        self._noted = False
        self._before: Tensor | None = None

    def __bool__(self) -> bool:
        return self._noted or bool(self._on_gradient.others or self._behind.others)

    @property
    def adding(self) -> bool:
        """True if the hooks are to see what a pass has added to a gradient that was there before."""
        return self._noted and self._before is not None

    def note(self) -> None:
        """Note the gradient that is there before a pass adds to it."""
        gradient = self._parameter.grad
        if self._on_gradient.others and (gradient is None or not self._noted):
            self._noted = True
            self._before = None if gradient is None else gradient.clone()

    def call(self) -> None:
        """Call them with the gradient of all ranks, which is in its place."""
        gradient = self._parameter.grad
        if self._noted and gradient is not None:
            before = self._before
            new = self._through(gradient.clone() if before is None else gradient - before)
            gradient.copy_(new if before is None else before + new)
        self._noted, self._before = False, None
        for hook in list(self._behind.others.values()):
            hook(self._parameter)

    def _see(self, gradient: Tensor | None) -> Tensor | None:
        """Torch's call with what comes to the parameter; None where a part of the graph has not been used."""
        if gradient is None:
            return None
        if self._is_asked_for():
            return self._through(gradient)
        self.note()
        return None

    def _is_asked_for(self) -> bool:
        """Return whether the gradient goes to a caller of `torch.autograd.grad`, and is not accumulated."""
        try:
            torch._C._will_engine_execute_node(adder(self._parameter))
        except RuntimeError:  # that is how torch says so
            return True
        return False

    def _through(self, gradient: Tensor) -> Tensor:
        for hook in list(self._on_gradient.others.values()):
            given = hook(gradient)
            if given is None:
                continue
            if given.shape != gradient.shape:
                raise BadOption(
                    f"a hook of register_hook made a tensor of shape {tuple(given.shape)} of a gradient of "
                    f"shape {tuple(gradient.shape)}; the shape must stay"
                )
            gradient = given
        return gradient


def adder(parameter: nn.Parameter) -> Any:
    """The autograd node that accumulates a parameter's gradient; it and its hooks live while referred to."""
    trained = parameter.requires_grad
    # The loop may evaluate in inference mode now, or call the model inside of `torch.func.grad`.
    with torch.inference_mode(False), torch.enable_grad(), temporarily_clear_interpreter_stack():
        parameter.requires_grad_(True)
        found = parameter.view_as(parameter).grad_fn
        parameter.requires_grad_(trained)
    assert found is not None, "it is a function of a parameter that is trained"
    return found.next_functions[0][0]
