"""A copy of the user's optimizer that moves given slices of parameters, with its own state."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from tutti.optim.kernels import KERNELS
from tutti.optim.state import add_slice, add_whole
from tutti.optim.without_compiler import plain_step
from tutti.replica import NONE_MISSING, Flat, Missing, vector_like, view_like
from tutti.state import LocalState

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
"""Optimizers that move each number independently. Exactly these classes: a subclass may do otherwise."""

COUNTERS = ("step", "mu_product", "eta", "mu")
"""State of the elementwise optimizers that exists once per parameter; the rest has the parameter's shape."""

FUSED: dict[str, frozenset[type[Optimizer]]] = {
    "cpu": frozenset({optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad}),
    "cuda": frozenset({optim.SGD, optim.Adam, optim.AdamW}),
}
"""Optimizers with a fused kernel in all versions of torch, by the type of the device."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return whether the optimizer may be given arbitrary stretches of the flat vectors."""
    # With eps = 0 the gaps between parameters, where gradient and state are zero, would become 0 / 0.
    return type(optimizer) in ELEMENTWISE and all(
        group.get("eps", 1) != 0 for group in optimizer.param_groups
    )


def is_fused(optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[Tensor]) -> bool:
    """Return whether a fused kernel moves this param group: torch has one, and the user asks for no other."""
    if group.get("fused") is not None or group.get("foreach") is not None:
        return bool(group.get("fused"))
    if group.get("differentiable") or group.get("capturable"):
        return False
    # Where the rate is a tensor, torch rounds to its type, which a fused kernel does not.
    if isinstance(group.get("lr"), Tensor) and group["lr"].dtype != torch.float64:
        return False
    # torch 2.13's fused SGD of the CPU leaves most weights of two bytes as they are.
    return all(
        p.dtype in (torch.float32, torch.float64) and type(optimizer) in FUSED.get(p.device.type, ())
        for p in parameters
    )


@dataclass(frozen=True)
class ParameterSlice:
    """Consecutive elements of a parameter, in the order of memory."""

    parameter: nn.Parameter
    elements: slice  # the range of its elements
    place: slice  # their slice of the flat vector; with the gap behind them, if the parameter may be cut


class GroupOptimizer:
    """An optimizer of the user's class for slices of one param group's parameters."""

    def __init__(
        self, user: Optimizer, group: int, flat: Flat, grads: Tensor, slices: list[ParameterSlice]
    ) -> None:
        self._user, self.group, self.slices = user, group, slices
        self._whole = not is_elementwise(user)
        self._theirs = frozenset(one.parameter for one in slices)
        self.parameters = [nn.Parameter(self._view(flat.weights, one)) for one in slices]
        self._grads = [self._view(grads, one) for one in slices]
        for parameter, grad in zip(self.parameters, self._grads, strict=True):
            parameter.grad = grad
        theirs = user.param_groups[group]
        self._own = {**theirs, "params": self.parameters}
        self._read = dict(theirs)
        self._fused = is_fused(user, theirs, self.parameters)
        if self._fused:
            self._own["fused"] = True
        self._kernel = KERNELS.get(type(user)) if self._fused and is_plain(theirs) else None
        self.optimizer = bare_copy(user, [self._own])
        self._step = plain_step(self.optimizer)
        self.load(user.state)

    def _view(self, vector: Tensor, one: ParameterSlice) -> Tensor:
        return view_like(vector[one.place], one.parameter) if self._whole else vector[one.place]

    def step(self, missing: Missing = NONE_MISSING) -> None:
        """Move the weights, except `missing` parameters, by the options of the user's param group."""
        present: Sequence[int] = range(len(self.parameters))
        if not missing.isdisjoint(self._theirs):
            present = [n for n, one in enumerate(self.slices) if one.parameter not in missing]
        if not self._fused:
            self._move(present)
            return
        # Fused kernels want a state of all parameters, or of none.
        known: list[int] = []
        new: list[int] = []
        for number in present:
            (known if self.optimizer.state.get(self.parameters[number]) else new).append(number)
        for turn in (known, new):
            if turn:
                self._move(turn)

    def add_state(self, held: LocalState, names: Mapping[nn.Parameter, str]) -> None:
        """Add what the optimizer keeps for the slices, by the names of the user's parameters."""
        for parameter, one in zip(self.parameters, self.slices, strict=True):
            kept, name = self.optimizer.state.get(parameter, {}), names[one.parameter]
            if self._whole:
                add_whole(held, name, kept)
            else:
                add_slice(held, name, one.parameter, one.elements, kept, COUNTERS)

    def load(self, kept: Mapping[Any, dict[str, Any]]) -> None:
        """Continue from the state of another optimizer for the user's parameters."""
        self.optimizer.state.clear()
        for parameter, one in zip(self.parameters, self.slices, strict=True):
            given = kept.get(one.parameter, {})
            state = deepcopy(given) if self._whole else _cut_state(given, one, self._fused)
            if state:
                self.optimizer.state[parameter] = state

    def _move(self, turn: Sequence[int]) -> None:
        theirs, state = self._user.param_groups[self.group], self.optimizer.state
        if self._kernel is not None:
            parameters, grads = self.parameters, self._grads
            if len(turn) < len(parameters):
                parameters, grads = [parameters[n] for n in turn], [grads[n] for n in turn]
            with torch.no_grad():
                if self._kernel(theirs, parameters, grads, state):
                    return
        for name, value in theirs.items():
            # Only what is new there: the optimizer may count in its group, too.
            if name not in ("params", "fused") and self._read.get(name, self) is not value:
                self._own[name] = self._read[name] = value
        left_out = set(range(len(self.parameters))).difference(turn)
        for number in left_out:
            self.parameters[number].grad = None
        self._step()
        for number in left_out:
            self.parameters[number].grad = self._grads[number]


def is_plain(group: dict[str, Any]) -> bool:
    """Return whether all options of a param group are Python numbers."""
    values = [value for name, value in group.items() if name not in ("params", "betas")]
    return not any(isinstance(value, Tensor) for value in (*values, *group.get("betas", ())))


def bare_copy(optimizer: Optimizer, groups: list[dict[str, Any]]) -> Optimizer:
    """Make an optimizer of the same class and settings, without state, over other param groups."""
    copy = object.__new__(type(optimizer))
    # A scheduler replaces `step` on the instance by a wrapper that steps the user's optimizer.
    copy.__dict__.update({name: value for name, value in vars(optimizer).items() if name != "step"})
    for name, value in list(vars(copy).items()):
        if name.startswith("_optimizer_") and name.endswith("_hooks"):
            copy.__dict__[name] = OrderedDict() if isinstance(value, OrderedDict) else {}
    copy.state = defaultdict(dict)
    copy.param_groups = groups
    return copy


def _cut_state(kept: Mapping[str, Any], one: ParameterSlice, fused: bool) -> dict[str, Any]:
    """Return a parameter's state, its tensors cut as the slice is."""
    state: dict[str, Any] = {}
    for name, value in kept.items():
        if value is None:
            continue
        if name in COUNTERS:
            as_is = isinstance(value, Tensor) and not fused
            device = one.parameter.device
            state[name] = deepcopy(value) if as_is else torch.tensor(float(value), device=device)
            continue
        held = vector_like(value, one.parameter)[one.elements]
        state[name] = value.new_zeros(one.place.stop - one.place.start)
        state[name][: len(held)] = held
    return state
