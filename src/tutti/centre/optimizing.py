"""A rule that runs the user's optimizer on the centre's weights; the messages are gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.centre.base import Allocate, Desk, Outcome, Rule, Slot, Vectors
from tutti.centre.hyperparameters import Hyperparameters
from tutti.centre.moving import AddRule
from tutti.centre.remedies import Remedy
from tutti.centre.states import BY_ITSELF, SlotState, allocate_states, describe
from tutti.errors import BadOption
from tutti.optim.runs import is_parameterwise
from tutti.optim.sharded import Piece, ShardedOptimizer, own_slices
from tutti.replica import Flat, Replica


class OptimizerRule(Rule):
    """c = optimizer(c, gradient), with the optimizer's state beside the centre's weights.

    Whoever brings a gradient runs the optimizer itself, on state that all of them share, with the options
    that its own optimizer has at that moment; over messages, those travel with the gradient.

    A message does not say which parameters had no gradient: what it has for them is a gradient of zeros, by
    which momentum and weight decay go on moving them, where torch would leave them as they are.

    With levels, the optimizer runs in the centre of each host; the one above adds up what they have moved.

    Args:
        optimizer: the user's. It is not stepped itself; its class, options and param groups are used.
        replica: the model that its parameters belong to.
        messages: the vectors that the messages are in; others are copied there. By default, vectors that all
            who apply the rule share.
        remedy: what is done to a stale gradient before, or to the learning rate for it.
        keep: whether a message is left as it is, so that it can be applied again.

    Raises:
        BadOption: the optimizer cannot move slices of vectors, or has no learning rate for `remedy` to scale;
            or it may use what several param groups or dtypes have together.
        BadModel: it moves a parameter that is not part of the model.
    """

    optimizes = True

    def __init__(
        self,
        optimizer: Optimizer,
        replica: Replica,
        messages: Vectors | None = None,
        remedy: Remedy | None = None,
        keep: bool = False,
    ) -> None:
        # Made for what it refuses.
        ShardedOptimizer(optimizer, replica, [slice(0, 0) for _ in replica.flats])
        _check_parted(optimizer, replica)
        if remedy is not None and remedy.scales:
            _check_rates(optimizer)
        self._optimizer, self._flats = optimizer, replica.flats
        self._messages, self._remedy = messages, remedy
        self.remembers, self.consumes = keep, not keep
        self.compares = remedy is not None and remedy.compares
        self._hyperparameters = Hyperparameters(optimizer)
        self._views: dict[int, tuple[Tensor, ...]] = {}
        self._pieces: dict[int, tuple[Piece, ...]] = {}
        self._states: dict[int, SlotState] = {}

    @override
    def cut(self, flat: Flat, parts: int) -> list[slice]:
        return own_slices(flat, parts, self._optimizer)

    @override
    def open(self, centre: Vectors, slots: Sequence[Slot], allocate: Allocate) -> None:
        if self._messages is None:
            self._messages = [allocate(len(vector), vector.dtype) for vector in centre]
        self._pieces = {slot.number: self._pieces_of(slot, centre, self._messages) for slot in slots}
        self._views = {slot.number: slot.views(self._messages) for slot in slots}
        # What the optimizer keeps is seen in a step of a copy; only then can it be laid out in shared memory.
        scratch = [vector.clone() for vector in centre]
        zeros = [torch.zeros_like(vector) for vector in centre]
        described = [describe(self._pieces_of(slot, scratch, zeros)) for slot in slots]
        states = allocate_states(described, allocate)
        self._states = {slot.number: state for slot, state in zip(slots, states, strict=True)}
        if self._remedy is not None:
            self._remedy.open(centre, slots, allocate)

    def _pieces_of(self, slot: Slot, weights: Vectors, messages: Vectors) -> tuple[Piece, ...]:
        return tuple(
            Piece(self._optimizer, replace(flat, weights=vector), message, place)
            for flat, vector, message, place in zip(self._flats, weights, messages, slot.places, strict=True)
        )

    @override
    def apply(self, desk: Desk) -> Outcome:
        if self._remedy is not None:
            self._remedy.apply(desk)
        for own, other in zip(self._views[desk.slot], desk.message, strict=True):
            if own.data_ptr() != other.data_ptr():
                own.copy_(other)
        with _scaled(self._optimizer, self._remedy.rate(desk) if self._remedy is not None else 1.0):
            self._states[desk.slot].step(self._pieces[desk.slot])
        return Outcome.APPLIED

    @override
    def inbox(self, slot: int) -> tuple[Tensor, ...]:
        return self._views[slot]

    @override
    def settings(self) -> list[float]:
        return self._hyperparameters.read()

    @override
    def use(self, settings: list[float]) -> None:
        self._hyperparameters.write(settings)

    @override
    def above(self, hosts: int) -> Rule:
        return AddRule()


@contextmanager
def _scaled(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """While inside, the learning rates of all param groups are multiplied by `factor`."""
    if factor == 1:
        yield
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _check_parted(optimizer: Optimizer, replica: Replica) -> None:
    """Each param group and each dtype is stepped by itself: right if each parameter is."""
    groups, dtypes = len(optimizer.param_groups), len(replica.flats)
    if groups * dtypes > 1 and not is_parameterwise(optimizer):
        raise BadOption(
            f"the optimizer {type(optimizer).__name__}, which is not one of torch's, has {groups} param "
            f"groups for a model of {dtypes} dtypes, and a parameter centre steps these one by one: what it "
            f"may compute over all of them would be wrong. {BY_ITSELF}"
        )


def _check_rates(optimizer: Optimizer) -> None:
    for number, group in enumerate(optimizer.param_groups):
        if "lr" not in group:
            raise BadOption(
                f"staleness 'inverse' scales the learning rate, but param group {number} of the optimizer "
                f"{type(optimizer).__name__} has no 'lr'; use '--strategy.staleness none', or an optimizer "
                "that has one"
            )
