"""A copy of the user's optimizer that moves given stretches of a flat vector, with a state of its own."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from tutti.optim.kernels import kernel_of
from tutti.replica import Flat, view_like

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    {
        optim.SGD,
        optim.Adam,
        optim.AdamW,
        optim.Adagrad,
        optim.Adadelta,
        optim.Adamax,
        optim.NAdam,
        optim.RAdam,
        optim.RMSprop,
        optim.Rprop,
        optim.ASGD,
    }
)
"""Optimizers that move each number by itself. Exactly these classes: a subclass may do otherwise."""

COUNTERS = ("step", "mu_product", "eta", "mu")
"""What the elementwise optimizers keep once for a parameter; all else has the parameter's shape."""

FUSED: dict[str, frozenset[type[Optimizer]]] = {
    "cpu": frozenset({optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad}),
    "cuda": frozenset({optim.SGD, optim.Adam, optim.AdamW}),
}
"""Those that all versions of torch have a fused kernel for, by the type of the device."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Whether the optimizer may be given arbitrary stretches of the flat vectors."""
    # With eps = 0 the gaps between parameters, where gradient and state are zero, would become 0 / 0.
    return type(optimizer) in ELEMENTWISE and all(
        group.get("eps", 1) != 0 for group in optimizer.param_groups
    )


def is_fused(optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[Tensor]) -> bool:
    """Whether a fused kernel moves this param group: torch has one, and the user asks for nothing else."""
    if group.get("fused") is not None or group.get("foreach") is not None:
        return bool(group.get("fused"))
    if group.get("differentiable") or group.get("capturable"):
        return False
    # torch 2.13's fused SGD of the CPU leaves most weights of two bytes as they are.
    return all(
        p.dtype in (torch.float32, torch.float64) and type(optimizer) in FUSED.get(p.device.type, ())
        for p in parameters
    )


@dataclass(frozen=True)
class Share:
    """What a stretch holds of one of the user's parameters.

    Attributes:
        parameter: the user's parameter.
        elements: which of its elements, in the order in which they lie in memory.
        at: where the first of them lies in the stretch.
    """

    parameter: nn.Parameter
    elements: slice
    at: int


@dataclass(frozen=True)
class Stretch:
    """Consecutive elements of a flat vector that an optimizer sees as one parameter.

    Attributes:
        place: where they lie in the vector.
        shares: the user's parameters that lie there.
    """

    place: slice
    shares: tuple[Share, ...]

    def view(self, vector: Tensor, whole: bool) -> Tensor:
        """The elements of `vector` here; in the parameter's own shape when they are one whole parameter."""
        stretch = vector[self.place]
        return view_like(stretch, self.shares[0].parameter) if whole else stretch


class Run:
    """Stretches of one param group and an optimizer of the user's class for them.

    Args:
        user: the user's optimizer.
        group: the number of its param group.
        flat: the vector that the stretches lie in.
        grads: the gradients, a vector of the same length.
        stretches: what to move.

    Attributes:
        optimizer: of the user's class, over `stretches`, with a state of its own.
    """

    def __init__(
        self, user: Optimizer, group: int, flat: Flat, grads: Tensor, stretches: list[Stretch]
    ) -> None:
        self._user, self._group = user, group
        whole = not is_elementwise(user)
        self._parameters = [nn.Parameter(stretch.view(flat.weights, whole)) for stretch in stretches]
        self._grads = [stretch.view(grads, whole) for stretch in stretches]
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = grad
        theirs = user.param_groups[group]
        self._own = {**theirs, "params": self._parameters}
        self._read = dict(theirs)
        fused = is_fused(user, theirs, self._parameters)
        if fused:
            self._own["fused"] = True
        self._kernel = kernel_of(type(user)) if fused and is_plain(theirs) else None
        self.optimizer = _bare_copy(user, self._own)
        for parameter, stretch in zip(self._parameters, stretches, strict=True):
            state = _whole_state(user, stretch) if whole else _cut_state(user, stretch, fused)
            if state:
                self.optimizer.state[parameter] = state

    def step(self) -> None:
        """Move the weights, by the options that the user's param group has now."""
        theirs, state = self._user.param_groups[self._group], self.optimizer.state
        if self._kernel is not None:
            with torch.no_grad():
                if self._kernel(theirs, self._parameters, self._grads, state):
                    return
        for name, value in theirs.items():
            # Only what is new there: the optimizer may count in its group, too.
            if name not in ("params", "fused") and self._read.get(name, self) is not value:
                self._own[name] = self._read[name] = value
        self.optimizer.step()

    @property
    def counted(self) -> dict[str, object]:
        """What the optimizer itself has changed in its param group."""
        options = [name for name in self._own if name not in ("params", "fused")]
        return {
            name: self._own[name] for name in options if self._own[name] is not self._read.get(name, self)
        }


def progress(optimizer: Optimizer, parameter: nn.Parameter) -> tuple[object, ...]:
    """How far the optimizer has come with a parameter; only equals can be joined to one."""
    state = optimizer.state.get(parameter, {})
    return (*sorted(state), *(float(state[name]) for name in COUNTERS if name in state))


def is_plain(group: dict[str, Any]) -> bool:
    """Whether all options of a param group are numbers of Python's."""
    values = [value for name, value in group.items() if name not in ("params", "betas")]
    return not any(isinstance(value, Tensor) for value in (*values, *group.get("betas", ())))


def _bare_copy(optimizer: Optimizer, group: dict[str, Any]) -> Optimizer:
    """An optimizer of the same class and settings, without state, over one param group."""
    copy = object.__new__(type(optimizer))
    # A scheduler replaces `step` on the instance by a wrapper that steps the user's optimizer.
    copy.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    for name, value in list(vars(copy).items()):
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            copy.__dict__[name] = OrderedDict() if isinstance(value, OrderedDict) else {}
    copy.state = defaultdict(dict)
    copy.param_groups = [group]
    return copy


def _whole_state(optimizer: Optimizer, stretch: Stretch) -> dict[str, Any]:
    return deepcopy(optimizer.state.get(stretch.shares[0].parameter, {}))


def _cut_state(optimizer: Optimizer, stretch: Stretch, fused: bool) -> dict[str, Any]:
    """What the user's optimizer has for the stretch, its tensors joined and cut as the stretch is."""
    state: dict[str, Any] = {}
    length = stretch.place.stop - stretch.place.start
    for name, first in optimizer.state.get(stretch.shares[0].parameter, {}).items():
        if first is None:
            continue
        if name in COUNTERS:
            device = stretch.shares[0].parameter.device
            state[name] = torch.tensor(float(first), device=device) if fused else deepcopy(first)
            continue
        state[name] = first.new_zeros(length)
        for share in stretch.shares:
            vector = first.new_zeros(share.parameter.numel())
            view_like(vector, share.parameter).copy_(optimizer.state[share.parameter][name])
            held = vector[share.elements]
            state[name][share.at : share.at + len(held)] = held
    return state
