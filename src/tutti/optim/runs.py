"""A copy of the user's optimizer that moves given stretches of a flat vector, with a state of its own.

Neighbours are joined into one long parameter until one of them is without a gradient for the first time:
from then on each has a state and counters of its own, and is left out while it has no gradient.
"""

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
from tutti.optim.state import add_stretch, add_whole
from tutti.replica import NONE_MISSING, Flat, Missing, vector_like, view_like
from tutti.state import Held

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
"""State of the elementwise optimizers that exists once per parameter; all else has the parameter's shape."""

FUSED: dict[str, frozenset[type[Optimizer]]] = {
    "cpu": frozenset({optim.SGD, optim.Adam, optim.AdamW, optim.Adagrad}),
    "cuda": frozenset({optim.SGD, optim.Adam, optim.AdamW}),
}
"""Those that all versions of torch have a fused kernel for, by the type of the device."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """Tell whether the optimizer may be given arbitrary stretches of the flat vectors."""
    # With eps = 0 the gaps between parameters, where gradient and state are zero, would become 0 / 0.
    return type(optimizer) in ELEMENTWISE and all(
        group.get("eps", 1) != 0 for group in optimizer.param_groups
    )


def is_fused(optimizer: Optimizer, group: dict[str, Any], parameters: Sequence[Tensor]) -> bool:
    """Tell whether a fused kernel moves this param group: torch has one, and the user asks for no other."""
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
    """A stretch's part of one of the user's parameters.

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
        place: where they lie in the vector; with the gap behind them, if they may be cut.
        shares: the user's parameters that lie there.
    """

    place: slice
    shares: tuple[ParameterSlice, ...]

    def view(self, vector: Tensor, whole: bool) -> Tensor:
        """Return the stretch of `vector`, in the shape of the parameter if it is one whole parameter."""
        stretch = vector[self.place]
        return view_like(stretch, self.shares[0].parameter) if whole else stretch


class GroupOptimizer:
    """Stretches of one param group and an optimizer of the user's class for them.

    Args:
        group: as below.
        grads: the gradients, a vector of the same length.
        stretches: what to move.

    Attributes:
        group: the number of its param group.
        stretches: what it moves; when a step leaves out a parameter, each parameter gets one of its own.
        optimizer: of the user's class, over `stretches`, with a state of its own.
        parameters: the stretches, as it sees them.
    """

    def __init__(
        self, user: Optimizer, group: int, flat: Flat, grads: Tensor, stretches: list[Stretch]
    ) -> None:
        self._user, self.group, self._vectors = user, group, (flat.weights, grads)
        self._whole = not is_elementwise(user)
        self._theirs = frozenset(share.parameter for stretch in stretches for share in stretch.shares)
        self._lay(stretches)
        theirs = user.param_groups[group]
        self._own = {**theirs, "params": self.parameters}
        self._read = dict(theirs)
        self._fused = is_fused(user, theirs, self.parameters)
        if self._fused:
            self._own["fused"] = True
        self._kernel = KERNELS.get(type(user)) if self._fused and is_plain(theirs) else None
        self.optimizer = bare_copy(user, [self._own])
        self.load(user.state)

    def step(self, missing: Missing = NONE_MISSING) -> None:
        """Move the weights, by the options that the user's param group has now.

        Args:
            missing: parameters that have no gradient; they and their state are left as they are.
        """
        present: Sequence[int] = range(len(self.parameters))
        if not missing.isdisjoint(self._theirs):
            self._split_up()
            theirs = [stretch.shares[0].parameter for stretch in self.stretches]
            present = [number for number, parameter in enumerate(theirs) if parameter not in missing]
        if not self._fused:
            self._move(present)
            return
        # Fused kernels take parameters that all have a state, or none of which has.
        known: list[int] = []
        new: list[int] = []
        for number in present:
            (known if self.optimizer.state.get(self.parameters[number]) else new).append(number)
        for turn in (known, new):
            if turn:
                self._move(turn)

    def add_state(self, held: Held, names: Mapping[nn.Parameter, str]) -> None:
        """Add what the optimizer keeps for the stretches, by the names of the user's parameters."""
        for parameter, stretch in zip(self.parameters, self.stretches, strict=True):
            kept = self.optimizer.state.get(parameter, {})
            for share in stretch.shares:
                name = names[share.parameter]
                if self._whole:
                    add_whole(held, name, kept)
                else:
                    add_stretch(held, name, share.parameter, share.elements, share.at, kept, COUNTERS)

    def load(self, kept: Mapping[Any, dict[str, Any]]) -> None:
        """Have the optimizer go on from what another one has kept for the user's parameters."""
        self.optimizer.state.clear()
        for parameter, stretch in zip(self.parameters, self.stretches, strict=True):
            given = kept.get(stretch.shares[0].parameter, {})
            state = deepcopy(given) if self._whole else _cut_state(kept, stretch, self._fused)
            if state:
                self.optimizer.state[parameter] = state

    def _lay(self, stretches: list[Stretch]) -> None:
        """Make a parameter of each stretch."""
        weights, grads = self._vectors
        self.stretches = stretches
        self.parameters = [nn.Parameter(stretch.view(weights, self._whole)) for stretch in stretches]
        self._grads = [stretch.view(grads, self._whole) for stretch in stretches]
        for parameter, grad in zip(self.parameters, self._grads, strict=True):
            parameter.grad = grad

    def _split_up(self) -> None:
        """Give each of the user's parameters a state of its own, which goes on from the joined one."""
        if all(len(stretch.shares) == 1 for stretch in self.stretches):
            return
        parts, states = [], []
        for parameter, stretch in zip(self.parameters, self.stretches, strict=True):
            ends = [*(share.at for share in stretch.shares[1:]), stretch.place.stop - stretch.place.start]
            for share, end in zip(stretch.shares, ends, strict=True):
                within = slice(share.at, end)
                place = slice(stretch.place.start + within.start, stretch.place.start + within.stop)
                parts.append(Stretch(place, (ParameterSlice(share.parameter, share.elements, 0),)))
                states.append(_part_of(self.optimizer.state.get(parameter, {}), within))
        self._lay(parts)
        self._own["params"] = self.parameters
        self.optimizer.state = defaultdict(dict)
        for parameter, state in zip(self.parameters, states, strict=True):
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
        self.optimizer.step()
        for number in left_out:
            self.parameters[number].grad = self._grads[number]


def progress(optimizer: Optimizer, parameter: nn.Parameter) -> tuple[object, ...]:
    """Return the optimizer's progress with a parameter; only parameters of equal progress can be joined."""
    state = optimizer.state.get(parameter, {})
    return (*sorted(state), *(float(state[name]) for name in COUNTERS if name in state))


def is_plain(group: dict[str, Any]) -> bool:
    """Tell whether all options of a param group are numbers of Python's."""
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


def _part_of(state: dict[str, Any], place: slice) -> dict[str, Any]:
    """Return the state of a part of a joined parameter: views of its tensors, and counters of its own."""
    return {
        name: deepcopy(value) if name in COUNTERS or value is None else value[place]
        for name, value in state.items()
    }


def _cut_state(kept: Mapping[Any, dict[str, Any]], stretch: Stretch, fused: bool) -> dict[str, Any]:
    """Return what is kept for the stretch's parameters, its tensors joined and cut as the stretch is."""
    state: dict[str, Any] = {}
    length = stretch.place.stop - stretch.place.start
    for name, first in kept.get(stretch.shares[0].parameter, {}).items():
        if first is None:
            continue
        if name in COUNTERS:
            device = stretch.shares[0].parameter.device
            kept_as_is = isinstance(first, Tensor) and not fused
            state[name] = deepcopy(first) if kept_as_is else torch.tensor(float(first), device=device)
            continue
        state[name] = first.new_zeros(length)
        for share in stretch.shares:
            held = vector_like(kept[share.parameter][name], share.parameter)[share.elements]
            state[name][share.at : share.at + len(held)] = held
    return state
