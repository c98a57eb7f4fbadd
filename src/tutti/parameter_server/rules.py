"""The rules by which messages move the centre's weights.

`AddRule` and `ElasticRule` move the weights themselves; `OptimizerRule` runs the user's optimizer on them,
with the messages as gradients; `Rounds` adds gradients up, and moves the centre when enough of them have
come; `DelayedNesterovRule` moves it by outer gradients, and its momentum when enough of them have come.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.errors import BadOption
from tutti.optim.clipping import clip
from tutti.optim.parameterwise import is_parameterwise
from tutti.optim.sharded import PIECE, FlatPiece, check_parameters, check_usable, own_slices
from tutti.optim.sliced_optimizer import GroupOptimizer
from tutti.optim.state import by_name
from tutti.parameter_server.base import Allocate, Outcome, Push, Rule, Slot, Vectors, slots_of
from tutti.parameter_server.optimizer_state import SharedState, allocate_states, describe
from tutti.replica import NONE_MISSING, Flat, Missing, Replica, copy_all
from tutti.state import LocalState, Named, fill, pieces_of


class AddRule(Rule):
    """The message is a move, which the centre makes too: c = c + m."""

    @override
    def apply(self, push: Push) -> Outcome:
        for centre, message in zip(push.centre, push.message, strict=True):
            centre.add_(message)
        return Outcome.APPLIED

    @override
    def above(self, hosts: int) -> Rule:
        return AddRule()


class ElasticRule(Rule):
    """The message is a worker's weights; they and the centre's attract each other.

    With levels, a host's centre is to the centre above what a worker is to its own: elastic averaging in a
    tree (Zhang 2016, "Distributed stochastic optimization for deep learning", chapter 6). Each of the
    `workers` pulls with the rate alpha = beta / p, where beta is `force`.
    """

    brings_weights = True

    def __init__(self, force: float, workers: int) -> None:
        self._force, self._rate = force, force / workers

    @override
    def apply(self, push: Push) -> Outcome:
        for centre, message in zip(push.centre, push.message, strict=True):
            attract(message, centre, self._rate)
        return Outcome.APPLIED

    @override
    def answer(self, push: Push) -> None:
        """Write the worker's moved weights into the reply."""
        assert push.reply is not None
        for reply, message in zip(push.reply, push.message, strict=True):
            if reply is not message:
                reply.copy_(message)

    @override
    def above(self, hosts: int) -> Rule:
        return ElasticRule(self._force, hosts)


class Hyperparameters:
    """The numbers among the options of an optimizer's param groups, in one order on workers and servers."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._names = [
            (number, name)
            for number, group in enumerate(optimizer.param_groups)
            # A scheduler may add options, and there may be none on the other side.
            for name in sorted(optimizer.defaults)
            if name in group and _numbers(group[name])
        ]

    def read(self) -> list[float]:
        """Return the values."""
        groups = self._optimizer.param_groups
        return [float(value) for number, name in self._names for value in _numbers(groups[number][name])]

    def write(self, values: list[float]) -> None:
        """Set the values; a number keeps its type, and a tensor its identity."""
        rest = iter(values)
        for number, name in self._names:
            group = self._optimizer.param_groups[number]
            old = group[name]
            new = [_like(one, next(rest)) for one in _numbers(old)]
            group[name] = type(old)(new) if isinstance(old, tuple | list) else new[0]


def _numbers(value: Any) -> list[Any]:
    """Return the numbers in an option: the option, or a tuple's elements; empty if it is something else."""
    values = value if isinstance(value, tuple | list) else [value]
    numbers = all(
        one.numel() == 1 if isinstance(one, Tensor) else isinstance(one, int | float) for one in values
    )
    return [*values] if numbers else []


def _like(old: Any, value: float) -> Any:
    if isinstance(old, Tensor):
        old.fill_(value)
        return old
    return type(old)(value)


class OptimizerRule(Rule):
    """c = optimizer(c, gradient), with the optimizer's state beside the centre's weights.

    The worker that brings a gradient runs the optimizer, on shared state, with its current options; over
    messages, these travel with the gradient, and so do the parameters without one, which are left as they
    are. With levels, the optimizer runs in the centre of each host; the one above adds up the hosts' moves.

    Source of `damped`: Zhang, Gupta, Lian, Liu 2016, "Staleness-aware Async-SGD for Distributed Deep
    Learning", arXiv:1511.05950, section 3.2.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        replica: Replica,
        messages: Vectors | None = None,  # the vectors that hold the messages; None: shared ones, for copies
        damped: bool = False,  # divide the learning rate by the staleness
        compensation: Compensation | None = None,
        keep: bool = False,  # a message may be applied again
    ) -> None:
        check_usable(type(optimizer))
        check_parameters(optimizer, replica)
        _check_shareable(optimizer)
        self._optimizer, self._flats = optimizer, replica.flats
        self._messages, self._damped, self._compensation = messages, damped, compensation
        self.remembers, self.compares = keep, compensation is not None
        self._hyperparameters = Hyperparameters(optimizer)
        self._views: dict[int, tuple[Tensor, ...]] = {}
        # Of the adaptive compensation: running means of the gradients' squares.
        self._means: Vectors = ()
        self._slots: dict[int, Slot] = {}
        self._runs: dict[int, list[tuple[GroupOptimizer, SharedState]]] = {}
        self.missing: Missing = NONE_MISSING  # parameters for which the next message has only zeros
        self._names = replica.names
        self.parameters = list(self._names)

    def names_missing(self) -> list[str]:
        """Return the names of the parameters that are `missing`."""
        return sorted(self._names[parameter] for parameter in self.missing)

    def miss(self, names: Collection[str]) -> None:
        """Set `missing` from the parameters' names."""
        self.missing = frozenset(parameter for parameter, name in self._names.items() if name in names)

    @override
    def cut(self, flats: Sequence[Flat], parts: int) -> list[Slot]:
        return slots_of([own_slices(flat, parts, self._optimizer) for flat in flats])

    @override
    def open(self, centre: Vectors, slots: Sequence[Slot], allocate: Allocate) -> None:
        if self._messages is None:
            self._messages = [allocate(len(vector), vector.dtype) for vector in centre]
        self._slots = {slot.number: slot for slot in slots}
        self._views = {slot.number: slot.views(self._messages) for slot in slots}
        if self._compensation is not None and self._compensation.decay is not None:
            self._means = [allocate(len(vector), vector.dtype) for vector in centre]
        # A step on a copy shows what the optimizer keeps, which is then laid out in shared memory.
        scratch = [vector.clone() for vector in centre]
        zeros = [torch.zeros_like(vector) for vector in centre]
        described = [
            describe(run.optimizer, run.parameters, run.step)
            for slot in slots
            for run in self._runs_of(slot, scratch, zeros)
        ]
        runs = {slot.number: self._runs_of(slot, centre, self._messages) for slot in slots}
        owners = [(run.optimizer, run.parameters) for of_slot in runs.values() for run in of_slot]
        states = iter(allocate_states(owners, described, allocate))
        self._runs = {number: [(run, next(states)) for run in of_slot] for number, of_slot in runs.items()}

    def _runs_of(self, slot: Slot, weights: Vectors, messages: Vectors) -> list[GroupOptimizer]:
        parts = zip(self._flats, weights, messages, slot.places, strict=True)
        return [
            run
            for flat, vector, message, place in parts
            for run in FlatPiece(self._optimizer, replace(flat, weights=vector), message, place).runs
        ]

    @override
    def apply(self, push: Push) -> Outcome:
        if self._compensation is not None:
            assert push.then is not None
            means = self._slots[push.slot].views(self._means) if self._means else None
            self._compensation.correct(push.message, push.centre, push.then, means)
        for own, other in zip(self._views[push.slot], push.message, strict=True):
            if own.data_ptr() != other.data_ptr():
                own.copy_(other)
        with _scaled(self._optimizer, 1.0 / max(1, push.staleness) if self._damped else 1.0):
            for run, state in self._runs[push.slot]:
                state.step(partial(run.step, self.missing))
        return Outcome.APPLIED

    @override
    def settings(self) -> list[float]:
        missing = [float(parameter in self.missing) for parameter in self.parameters]
        return [*missing, *self._hyperparameters.read()]

    @override
    def use(self, settings: list[float]) -> None:
        pairs = zip(self.parameters, settings, strict=False)
        self.missing = frozenset(parameter for parameter, missing in pairs if missing)
        self._hyperparameters.write(settings[len(self.parameters) :])

    @override
    def state(self, slot: int) -> LocalState:
        held = LocalState()
        for run, shared in self._runs[slot]:
            shared.take()
            run.add_state(held, self._names)
        for flat, mean, place in zip(self._flats, self._means, self._slots[slot].places, strict=False):
            held.pieces += pieces_of(SQUARES, flat, mean, place)
        return held

    @override
    def load_state(self, held: Named) -> None:
        for slot in self._slots.values():
            for flat, mean, place in zip(self._flats, self._means, slot.places, strict=False):
                fill(held.tensors, SQUARES, flat, mean, place)
        kept = by_name([held])
        for run, shared in (pair for pairs in self._runs.values() for pair in pairs):
            run.load({p: kept[name] for p, name in self._names.items() if name in kept})
            shared.leave()

    @override
    def above(self, hosts: int) -> Rule:
        return AddRule()


SQUARES: Final = "mean_squares"
"""The first word of the names of the compensation's running means, in a checkpoint."""


@dataclass(frozen=True)
class Compensation:
    """Delay compensation: gradients corrected by the loss's curvature along the way of the weights.

        g = g + lambda * g * g * (w_now - w_then)             (all products elementwise)

    With a decay the strength is smaller where gradients are large:

        s = m s + (1 - m) g * g                               zero at first
        g = g + lambda / sqrt(s + 1e-7) * g * g * (w_now - w_then)

    Source: Zheng et al. 2017, "Asynchronous Stochastic Gradient Descent with Delay Compensation",
    arXiv:1609.08326, equation 10 and algorithm 2 (DC-ASGD-c): g * g stands for the diagonal of the Hessian;
    section 5 (DC-ASGD-a).
    """

    strength: float  # lambda
    decay: float | None = None  # m; None: the strength is the same everywhere

    def correct(self, gradients: Vectors, now: Vectors, then: Vectors, means: Vectors | None) -> None:
        """Correct gradients in place; `means` is s, which is updated in place."""
        squares = [gradient * gradient for gradient in gradients]
        if means is not None and self.decay is not None:
            for mean, square in zip(means, squares, strict=True):
                mean.lerp_(square, 1 - self.decay)
                square.div_((mean + 1e-7).sqrt_())
        for gradient, square, here, there in zip(gradients, squares, now, then, strict=True):
            gradient.addcmul_(square, here - there, value=self.strength)


@contextmanager
def _scaled(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Multiply the learning rates of all param groups by `factor` inside."""
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


def _check_shareable(optimizer: Optimizer) -> None:
    if not is_parameterwise(optimizer):
        raise BadOption(
            f"the optimizer {type(optimizer).__name__}, which is not one of torch's, may keep what the "
            "workers of a parameter centre cannot share. Let each worker run it: '--strategy "
            "downpour --strategy.side worker'"
        )


ROUNDING: Final = 1e-9
"""Tolerance of a sum of shares for what it stands for: 0.7 is not exact in binary."""

EPSILON: Final = 1e-14
"""Distance of a sum of shares from 1 that rounding explains."""


class Rounds(OptimizerRule):
    """A round: c = optimizer(c, clip(sum of the gradients that have come / sum of their shares)).

    A gradient names its round, which closes when its gradients stand for the quorum of the update's samples,
    or when all workers have sent theirs; then the workers are answered. A later gradient is dropped.
    Parameters without a gradient in a round are left as they are. `norm` and `value` are the limits of
    `Clip`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        replica: Replica,
        workers: int,
        quorum: float = 1.0,
        norm: float | None = None,
        value: float | None = None,
        rank: int = 0,
    ) -> None:
        super().__init__(optimizer, replica)
        self._workers, self._quorum, self._norm, self._value = workers, quorum, norm, value
        # The next message: its share of the update's samples, its sender, and its update, from 0.
        self.share, self.rank, self.round = 1 / workers, rank, 0
        # For each slot, of each worker: its message.
        self._boxes: dict[int, list[tuple[Tensor, ...]]] = {}
        # Likewise: whether it has come, and its share. Last: closed rounds.
        self._counts: dict[int, Tensor] = {}
        # For each slot: 1 for each parameter that a message had a gradient of.
        self._brought: dict[int, Tensor] = {}

    @property
    def waits(self) -> bool:
        """True if no round closes before all workers have pushed."""
        return self._quorum >= 1

    @override
    def cut(self, flats: Sequence[Flat], parts: int) -> list[Slot]:
        return super().cut(flats, parts if self._norm is None else 1)

    @override
    def open(self, centre: Vectors, slots: Sequence[Slot], allocate: Allocate) -> None:
        super().open(centre, slots, allocate)
        boxes = [[allocate(len(one), one.dtype) for one in centre] for _ in range(self._workers)]
        self._boxes = {slot.number: [slot.views(box) for box in boxes] for slot in slots}
        counts = allocate(len(slots) * (self._workers + 1) * 2, torch.float64)
        counts = counts.view(len(slots), self._workers + 1, 2)
        brought = allocate(len(slots) * len(self.parameters), torch.uint8).view(len(slots), -1)
        self._counts = {slot.number: row for slot, row in zip(slots, counts, strict=True)}
        self._brought = {slot.number: row for slot, row in zip(slots, brought, strict=True)}

    @override
    def apply(self, push: Push) -> Outcome:
        counts = self._counts[push.slot]
        if int(counts[-1, 0]) != self.round:
            return Outcome.DROPPED
        self._brought[push.slot] |= self._present()
        counts[self.rank] = torch.tensor([1, self.share], dtype=torch.float64)
        came, share = counts[:-1].sum(0).tolist()
        if came < self._workers and (self.waits or share < self._quorum - ROUNDING):
            copy_all(self._boxes[push.slot][self.rank], push.message)
            return Outcome.WAITING
        self._close(push, share)
        return Outcome.APPLIED

    def _add_up(self, push: Push) -> tuple[Tensor, ...]:
        """Return the sum of a round's messages, always in the order of the workers."""
        totals, came = self._views[push.slot], self._counts[push.slot][:-1, 0].tolist()
        boxes = [
            push.message if worker == self.rank else box
            for worker, box in enumerate(self._boxes[push.slot])
            if came[worker]
        ]
        for total, *messages in zip(totals, *boxes, strict=True):
            for start in range(0, len(total), PIECE):
                first, *others = (one[start : start + PIECE] for one in messages)
                here = total[start : start + PIECE].copy_(first)
                for other in others:
                    here.add_(other)
        return totals

    def _present(self) -> Tensor:
        """Return, for each parameter, 1 if the message has a gradient of it, else 0."""
        present = torch.ones(len(self.parameters), dtype=torch.uint8)
        if self.missing:
            present[[n for n, p in enumerate(self.parameters) if p in self.missing]] = 0
        return present

    def _close(self, push: Push, share: float) -> None:
        """Step by the sum of the gradients / their share, if any had samples, and open the next round."""
        counts, brought = self._counts[push.slot], self._brought[push.slot]
        if share > 0:
            totals = self._add_up(push)
            if abs(share - 1) > EPSILON:
                for total in totals:
                    total.div_(share)
            clip(totals, self._norm, self._value)
            pairs = zip(self.parameters, brought.tolist(), strict=True)
            self.missing = frozenset(parameter for parameter, has in pairs if not has)
            super().apply(Push(push.slot, push.centre, totals, None))
        brought.zero_()
        counts[:-1] = 0
        counts[-1, 0] += 1

    @override
    def settings(self) -> list[float]:
        return [self.rank, self.share, self.round, *super().settings()]

    @override
    def use(self, settings: list[float]) -> None:
        self.rank, self.share, self.round = int(settings[0]), settings[1], int(settings[2])
        super().use(settings[3:])

    @override
    def above(self, hosts: int) -> Rule:
        raise BadOption(
            "a synchronous parameter server has one level, as a round of it closes everywhere at once; use "
            "'--levels 1'"
        )


class DelayedNesterovRule(Rule):
    """The message is an outer gradient d, which moves the centre at once; momentum waits for N of them.

        s = s + d,   c = c - lr d / N                                  with every message
        v = momentum v + s / N,   c = c - lr momentum v,   s = 0       with every N-th

    With N = 1 this is SGD with Nesterov's momentum. With levels, the centre above adds up the moves of the
    centres below.

    Source: Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling", arXiv:2401.09135,
    algorithm 3, with the momentum activation c at its default, 0; there lr is epsilon, momentum beta.
    """

    def __init__(self, flats: Sequence[Flat], lr: float, momentum: float, delay: int) -> None:
        self._flats, self._lr, self._momentum, self._delay = flats, lr, momentum, delay
        self._slots: dict[int, Slot] = {}

    @override
    def open(self, centre: Vectors, slots: Sequence[Slot], allocate: Allocate) -> None:
        self._slots = {slot.number: slot for slot in slots}
        self._sums = [allocate(len(vector), vector.dtype) for vector in centre]
        self._velocities = [allocate(len(vector), vector.dtype) for vector in centre]
        counts = allocate(len(slots), torch.int64)
        self._counts = {slot.number: count for slot, count in zip(slots, counts, strict=True)}

    @override
    def apply(self, push: Push) -> Outcome:
        slot, count = self._slots[push.slot], self._counts[push.slot]
        count += 1
        due = int(count) >= self._delay
        kept = slot.views(self._sums), slot.views(self._velocities)
        for centre, delta, total, velocity in zip(push.centre, push.message, *kept, strict=True):
            total.add_(delta)
            centre.sub_(delta, alpha=self._lr / self._delay)
            if due:
                velocity.mul_(self._momentum).add_(total, alpha=1 / self._delay)
                centre.sub_(velocity, alpha=self._lr * self._momentum)
                total.zero_()
        if due:
            count.zero_()
        return Outcome.APPLIED

    @override
    def state(self, slot: int) -> LocalState:
        held = LocalState(numbers={BUFFERED: int(self._counts[slot])})
        for flat, place, total, velocity in self._kept(self._slots[slot]):
            held.pieces += pieces_of(OUTER_SUM, flat, total, place)
            held.pieces += pieces_of(OUTER_VELOCITY, flat, velocity, place)
        return held

    @override
    def load_state(self, held: Named) -> None:
        for number, slot in self._slots.items():
            self._counts[number].fill_(held.numbers[BUFFERED])
            for flat, place, total, velocity in self._kept(slot):
                fill(held.tensors, OUTER_SUM, flat, total, place)
                fill(held.tensors, OUTER_VELOCITY, flat, velocity, place)

    def _kept(self, slot: Slot) -> Iterator[tuple[Flat, slice, Tensor, Tensor]]:
        return zip(self._flats, slot.places, self._sums, self._velocities, strict=True)

    @override
    def above(self, hosts: int) -> Rule:
        return AddRule()


OUTER_SUM: Final = "outer_sum"
"""The first word of the names of the sum s of a delayed momentum, in a checkpoint."""

OUTER_VELOCITY: Final = "outer_velocity"
"""The first word of the names of its velocity v."""

BUFFERED: Final = "outer_gradients"
"""The name of the number of outer gradients in the sum."""


def attract(worker: Tensor, centre: Tensor, rate: float) -> None:
    """Move a worker's weights and the centre's towards each other, both in place.

        d = rate * (x - c)        x = x - d        c = c + d

    Source: Zhang, Choromanska, LeCun 2015, "Deep learning with Elastic Averaging SGD", arXiv:1412.6651,
    algorithm 1, steps a and b; `rate` is the paper's alpha; at 0.5 they meet in the middle.
    """
    distance = worker - centre
    worker.sub_(distance, alpha=rate)
    centre.add_(distance, alpha=rate)
