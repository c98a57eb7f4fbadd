"""A rule that runs the user's optimizer on the centre's weights; the messages are gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.centre.base import Allocate, Desk, Outcome, Rule, Slot, Vectors
from tutti.centre.hyperparameters import Hyperparameters
from tutti.centre.moving import AddRule
from tutti.centre.own_optimizer import OwnOptimizer
from tutti.centre.remedies import Remedy
from tutti.centre.states import BY_ITSELF, Entry, Holder, SharedState, allocate_states, describe
from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.optim.missing import NONE_MISSING, Missing
from tutti.optim.runs import is_parameterwise
from tutti.optim.sharded import Piece, check_hooks, check_parameters, check_usable, own_slices
from tutti.replica import Flat, Replica

WORD: Final = 48
"""Parameters for which one setting says whether they are missing: so many bits a float64 has exactly."""


class OptimizerRule(Rule):
    """c = optimizer(c, gradient), with the optimizer's state beside the centre's weights.

    Whoever brings a gradient runs the optimizer itself, on state that all of them share, with the options
    that its own optimizer has at that moment; over messages, those travel with the gradient.

    With the gradient comes which parameters there is none for: those and their state are left as they are.

    With levels, the optimizer runs in the centre of each host; the one above adds up what they have moved.

    Args:
        optimizer: the user's. It is not stepped itself; its class, options and param groups are used.
        replica: the model that its parameters belong to.
        messages: the vectors that the messages are in; others are copied there. By default, vectors that all
            who apply the rule share.
        remedy: what is done to a stale gradient before, or to the learning rate for it.
        keep: whether a message is left as it is, so that it can be applied again.
        comm: the workers; in a loop of the user's it is the optimizer itself that steps, on whichever of them
            brings a gradient.

    Attributes:
        missing: the parameters for which the next message has no gradient, but zeros.
        parameters: those of the model.

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
        comm: Communicator | None = None,
    ) -> None:
        check_usable(type(optimizer))
        check_parameters(optimizer, replica)
        self._own: OwnOptimizer | None = None
        if replica.in_own_loop and comm is not None:
            self._own = OwnOptimizer(optimizer, replica, comm)
        else:
            check_hooks(optimizer)
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
        self._holders: dict[int, list[Holder]] = {}
        self._states: dict[int, SharedState] = {}
        self.missing: Missing = NONE_MISSING
        self.parameters = [parameter for flat in replica.flats for parameter in flat.parameters]

    @override
    def cut(self, flat: Flat, parts: int) -> list[slice]:
        return own_slices(flat, parts, self._optimizer)

    @override
    def most_slots(self) -> int | None:
        return 1 if self._own is not None else None

    @override
    def open(self, centre: Vectors, slots: Sequence[Slot], allocate: Allocate) -> None:
        if self._messages is None:
            self._messages = [allocate(len(vector), vector.dtype) for vector in centre]
        self._views = {slot.number: slot.views(self._messages) for slot in slots}
        if self._remedy is not None:
            self._remedy.open(centre, slots, allocate)
        if self._own is not None:
            self._own.open(centre, self._messages, allocate)
        else:
            self._open_slots(centre, self._messages, slots, allocate)

    def _open_slots(
        self, centre: Vectors, messages: Vectors, slots: Sequence[Slot], allocate: Allocate
    ) -> None:
        self._pieces = {slot.number: self._pieces_of(slot, centre, messages) for slot in slots}
        # What the optimizer keeps is seen in a step of a copy; only then can it be laid out in shared memory.
        scratch = [vector.clone() for vector in centre]
        zeros = [torch.zeros_like(vector) for vector in centre]
        described = [_describe(self._pieces_of(slot, scratch, zeros)) for slot in slots]
        self._holders = {number: _holders(pieces) for number, pieces in self._pieces.items()}
        states = allocate_states(described, allocate)
        self._states = {slot.number: state for slot, state in zip(slots, states, strict=True)}

    def _pieces_of(self, slot: Slot, weights: Vectors, messages: Vectors) -> tuple[Piece, ...]:
        return tuple(
            Piece(self._optimizer, replace(flat, weights=vector), message, place, apart=True)
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
            self._step(desk.slot)
        return Outcome.APPLIED

    @override
    def answer(self, desk: Desk) -> None:
        super().answer(desk)
        if self._own is not None:
            self._own.forget()

    def adopt(self) -> None:
        """Go on from the state that the user's optimizer has been given in its loop (collective)."""
        if self._own is not None:
            self._own.adopt()

    def _step(self, slot: int) -> None:
        if self._own is not None:
            self._own.step(self.missing)
            return

        def move() -> None:
            for piece in self._pieces[slot]:
                piece.step(self.missing)

        self._states[slot].step(self._holders[slot], move)

    @override
    def inbox(self, slot: int) -> tuple[Tensor, ...]:
        return self._views[slot]

    @override
    def settings(self) -> list[float]:
        words = [0] * -(-len(self.parameters) // WORD)
        if self.missing:
            for number, parameter in enumerate(self.parameters):
                words[number // WORD] |= (parameter in self.missing) << number % WORD
        return [*map(float, words), *self._hyperparameters.read()]

    @override
    def use(self, settings: list[float]) -> None:
        count = -(-len(self.parameters) // WORD)
        words = [int(word) for word in settings[:count]]
        self.missing = NONE_MISSING
        if any(words):
            self.missing = frozenset(
                parameter
                for number, parameter in enumerate(self.parameters)
                if words[number // WORD] >> number % WORD & 1
            )
        self._hyperparameters.write(settings[count:])

    @override
    def above(self, hosts: int) -> Rule:
        return AddRule()


def _holders(pieces: Sequence[Piece]) -> list[Holder]:
    return [
        Holder(run.optimizer, run.optimizer.param_groups[0]["params"])
        for piece in pieces
        for run in piece.runs
    ]


def _describe(pieces: Sequence[Piece]) -> list[Entry]:
    def move() -> None:
        for piece in pieces:
            piece.step()

    return describe(_holders(pieces), move)


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
    if max(groups, dtypes) > 1 and not is_parameterwise(optimizer):
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
