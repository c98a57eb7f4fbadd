"""Downpour SGD: asynchronous workers push gradients to a parameter server and pull weights from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.optim.sharded import ShardedOptimizer
from tutti.parameter_server.base import Rule
from tutti.parameter_server.rules import AddRule, Compensation, OptimizerRule
from tutti.registry import part
from tutti.replica import Replica, copy_all
from tutti.state import Saved, State, fill_all, pieces_of_all
from tutti.strategies.base import Clip, Worker
from tutti.strategies.centred import Centred, CentredWorker
from tutti.strategies.options import choice, number, whole

SIDES = ("centre", "worker")
REMEDIES = ("none", "inverse", "delay_compensated", "delay_compensated_adaptive")
UNPUSHED: Final = "unpushed"
"""The first word of the names of what a worker has not pushed yet, in a checkpoint."""

BEFORE: Final = "weights_before"
"""The first word of the names of the weights from which it counts its moves."""


STRENGTHS = {"delay_compensated": 0.04, "delay_compensated_adaptive": 2.0}
"""lambda and lambda_0 of Zheng et al., for CIFAR-10."""


@part("downpour")
@dataclass(frozen=True)
class Downpour(Centred):
    """Downpour SGD: each worker pushes gradients to the centre, and pulls its weights, at its own pace.

        a = a + g(w)                   after every batch; g is clipped by the worker
        w = w - eta g(w)               between two pulls
        c = optimizer(c, a), a = 0     every `push_every` batches
        w = c                          every `pull_every` batches

    Each worker has its own batches; the staleness of a push is the number of other workers' gradients that
    the centre has applied since the pull.

        worker 0   pull │ backward │ push, pull │ backward    │ push, pull
        centre                          c1 ─ c2 ─ c3 ─────────── c4
        worker 1   pull │   backward     │ push, pull │ backward ...
                                            staleness 1: c1 came in between

    With `side` "worker" the worker's optimizer moves the weights, and a push sends their move since the last
    push: c = c + (w - w_before). Each worker then has its own momentum.

    The effect of `staleness` on a push that is tau updates late:

        inverse                      uses it at the learning rate eta / tau
        delay_compensated            g + lambda g g (c - w), elementwise, with the w that g was computed at
        delay_compensated_adaptive   the same, with lambda / sqrt(running mean of g g)

    Delay compensation corrects a single gradient, so it needs `push_every` 1. A push includes w, which the
    worker has moved if it pulls less often.

    Dean et al. push after the first batch, and then at intervals; here the first push, too, comes after
    `push_every`. Their centre's optimizer is Adagrad; between two pulls a worker makes steps of plain SGD
    with any optimizer, as in their algorithm. They fetch and push while computing; here a worker waits for
    both, as in mpiT and mpi_learn, where one number sets the interval of both.

    Sources: Dean et al. 2012, "Large Scale Distributed Deep Networks", section 4.1 and algorithm 1 of the
    appendix. Zhang, Gupta, Lian, Liu 2016, "Staleness-aware Async-SGD for Distributed Deep Learning",
    arXiv:1511.05950, section 3.2. Zheng et al. 2017, "Asynchronous Stochastic Gradient Descent with Delay
    Compensation", arXiv:1609.08326 (there for plain SGD; here whichever optimizer follows).
    """

    push_every: int = whole(1, "batches of a worker between two pushes")
    pull_every: int = whole(1, "batches of a worker between two pulls")
    side: str = choice(
        "centre",
        "where the optimizer runs: in the centre, to which workers push gradients, or on each worker, which "
        "pushes how far its weights have moved",
        SIDES,
    )
    staleness: str = choice("none", "what is done to a stale gradient", REMEDIES)
    strength: float | None = number(
        None, "lambda of the delay compensation (by default 0.04, adaptive 2)", least=0
    )
    decay: float = number(0.95, "m of the adaptive delay compensation's running mean", least=0, below=1)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        if self.side == "worker" and self.staleness != "none":
            raise BadOption(
                f"{self.as_given('staleness')}, which needs gradients, but with side 'worker' the centre "
                "gets moves of the weights; use side 'centre'"
            )
        if self.push_every > 1 and self.staleness in STRENGTHS:
            raise BadOption(
                f"{self.as_given('staleness')}, which corrects one gradient by the weights that it was "
                f"computed at, but with push_every {self.push_every} the centre gets sums of several; use "
                "push_every 1, or staleness 'inverse'"
            )

    @property
    @override
    def period(self) -> int:
        return max(self.push_every, self.pull_every)

    @override
    def rule(self, replica: Replica, optimizer: Optimizer, workers: int, clip: Clip) -> Rule:
        if self.side == "worker":
            return AddRule()
        return self.optimizer_rule(optimizer, replica, [flat.grads for flat in replica.flats])

    def optimizer_rule(self, optimizer: Optimizer, replica: Replica, messages: list[Tensor]) -> OptimizerRule:
        """Make the rule of a centre that runs the optimizer."""
        compensation = None
        if self.staleness in STRENGTHS:
            strength = STRENGTHS[self.staleness] if self.strength is None else self.strength
            decay = None if self.staleness == "delay_compensated" else self.decay
            compensation = Compensation(strength, decay)
        return OptimizerRule(optimizer, replica, messages, self.staleness == "inverse", compensation)

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        kind = _PushesMoves if self.side == "worker" else _PushesGradients
        return kind(self, replica, comm, optimizer, clip)


class _DownpourWorker(CentredWorker):
    """A worker that pushes and pulls at intervals; its subclasses choose the message."""

    def __init__(
        self,
        strategy: Downpour,
        replica: Replica,
        comm: Communicator,
        optimizer: Optimizer,
        clip: Clip,
        rule: Rule,
        message: list[Tensor],
        steps: ShardedOptimizer | None = None,
    ) -> None:
        super().__init__(replica, comm, rule, optimizer, clip, steps)
        self._strategy, self.message, self._batches = strategy, message, 0
        # Whether the message has something that was not pushed yet.
        self.has_unpushed = False
        if strategy.push_every > 1:
            self.restarts += ("what each worker has not pushed yet",)

    def begin(self) -> None:
        """Count a batch, and note whether a push and a pull are due after it."""
        self._batches += 1
        self.pushes = self._batches % self._strategy.push_every == 0
        self.pulls = self._batches % self._strategy.pull_every == 0

    def exchange(self, at: Sequence[Tensor] = ()) -> None:
        """Push and pull, if they are due; `at` holds the weights at which the message was computed."""
        if self.pushes and self.pulls:
            self.count(self.centre.exchange(self.message, self.weights, at))
        elif self.pushes:
            self.count(self.centre.push(self.message, at=at))
        elif self.pulls:
            self.centre.pull(self.weights)
        self.has_unpushed = not self.pushes
        for vector in self.message if self.pushes else ():
            vector.zero_()

    @override
    def state(self) -> State:
        state = super().state()
        state.own |= {"batches": self._batches, "has_unpushed": self.has_unpushed}
        if self.has_unpushed:
            state.alone.pieces += pieces_of_all(UNPUSHED, self.replica.flats, self.message)
        return state

    @override
    def load_state(self, saved: Saved) -> None:
        super().load_state(saved)
        if saved.own is not None and saved.alone is not None:
            self._batches, self.has_unpushed = saved.own["batches"], saved.own["has_unpushed"]
            if self.has_unpushed:
                fill_all(saved.alone.tensors, UNPUSHED, self.replica.flats, self.message)

    @override
    def flush(self) -> None:
        if self.has_unpushed:
            self.count(self.centre.push(self.message))


class _PushesGradients(_DownpourWorker):
    """A worker whose optimizer runs in the centre; plain SGD bridges the time between two pulls."""

    def __init__(
        self, strategy: Downpour, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip
    ) -> None:
        grads = [flat.grads for flat in replica.flats]
        message = grads if strategy.push_every == 1 else [torch.zeros_like(grad) for grad in grads]
        rule = strategy.optimizer_rule(optimizer, replica, message)
        super().__init__(strategy, replica, comm, optimizer, clip, rule, message)
        self._optimizer, self._optimizer_rule = optimizer, rule
        self._at = [weights.clone() for weights in self.weights] if rule.compares else []

    @override
    @torch.no_grad()
    def step(self) -> None:
        missing = self.replica.gradients.missing()
        if self.has_unpushed:
            missing &= self._optimizer_rule.missing
        self._optimizer_rule.missing = missing
        self.prepare()
        self.begin()
        at = self.weights if self._at else []
        if not self.pulls:
            at = self._at
            for then, weights in zip(at, self.weights, strict=False):
                then.copy_(weights)
            with self.updating:
                _descend(self._optimizer)
        if self._strategy.push_every > 1:
            for message, grad in zip(self.message, self.grads, strict=True):
                message.add_(grad)
                grad.zero_()
        self.exchange(at)

    @override
    def state(self) -> State:
        state = super().state()
        state.own["missing"] = self._optimizer_rule.names_missing()
        return state

    @override
    def load_state(self, saved: Saved) -> None:
        super().load_state(saved)
        if saved.own is not None:
            self._optimizer_rule.miss(saved.own["missing"])


class _PushesMoves(_DownpourWorker):
    """A worker that runs the optimizer itself; the centre adds up how far it has moved the weights."""

    def __init__(
        self, strategy: Downpour, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip
    ) -> None:
        rule = strategy.rule(replica, optimizer, comm.size, clip)
        message = [torch.zeros_like(flat.weights) for flat in replica.flats]
        steps = ShardedOptimizer(optimizer, replica)
        super().__init__(strategy, replica, comm, optimizer, clip, rule, message, steps)
        self._before = [weights.clone() for weights in self.weights]
        self.private = {BEFORE: self._before}

    @override
    @torch.no_grad()
    def step(self) -> None:
        self.move()
        self.begin()
        if self.pushes or self.pulls:
            self._add_moves()
            self.exchange()
            copy_all(self._before, self.weights)

    def _add_moves(self) -> None:
        for message, before, weights in zip(self.message, self._before, self.weights, strict=True):
            message.add_(weights).sub_(before)
        self.has_unpushed = True

    @override
    @torch.no_grad()
    def flush(self) -> None:
        """Push the moves of the weights since the last push."""
        if self.has_unpushed:
            self._add_moves()
            super().flush()


def _descend(optimizer: Optimizer) -> None:
    """Step by plain SGD, w = w - eta g, by the optimizer's learning rates."""
    for group in optimizer.param_groups:
        parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
        sign = 1.0 if group.get("maximize") else -1.0
        if parameters:
            gradients = [parameter.grad for parameter in parameters]
            torch._foreach_add_(parameters, gradients, alpha=sign * float(group["lr"]))
