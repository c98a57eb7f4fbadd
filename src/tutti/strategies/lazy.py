"""A lazy parameter server: staleness is bounded, and workers send only gradients that have changed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import torch
from torch import Tensor, optim
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.parameter_server.base import Receipt, Rule
from tutti.parameter_server.rules import OptimizerRule
from tutti.registry import part
from tutti.replica import Replica, copy_all, squared_norm
from tutti.state import Saved, State
from tutti.strategies.base import Clip, Worker
from tutti.strategies.centred import Centred, CentredWorker
from tutti.strategies.options import number, whole

SENT: Final = "sent_gradient"
"""The first word of the names of the gradient that a worker has sent last, in a checkpoint."""

STRETCH = 1 << 16
"""Elements whose difference is squared at a time: it stays in the core's cache."""


@part("lazy")
@dataclass(frozen=True)
class Lazy(Centred):
    """A parameter server with bounded staleness, to which workers send only gradients that have changed.

        for every batch:
            g = gradient at w
            if |g - sent|^2 > threshold / (eta workers)^2 * sum of the latest |moves of w|^2:   sent = g
            c = optimizer(c, sent)                  the centre keeps `sent`, so an unchanged one costs nothing
            wait until no worker is more than `slack` batches behind
            w = c                                   with all updates of `slack` + 1 batches ago and before

    The first condition comes from lazily aggregated gradients: a gradient that has changed less than the
    moves of the weights suggest may be used once more. The second makes the training stale synchronous: with
    `slack` 0 the workers go from batch to batch together, with more a worker may lag behind.

        slack 1   worker 0  │ g, send │ g, keep │ waits │ g, send │
                  centre         c1        c2      c3      c4
                  worker 1  │       g, send        │     g, send     │

    Each worker has its own batches. eta is the learning rate of the first param group, divided by 1 -
    momentum (there is no momentum in the paper); the comparison holds only for SGD, whose moves are eta times
    the gradient. So the default `threshold` is 0, which sends every gradient that has changed. The paper's is
    0.1, for gradients of all samples; small batches also differ by noise, so that a larger one (10,
    100) is needed before any is kept. In the paper all workers step together, and the moves are the centre's
    from step to step; here they are between two reads of one worker.

    Ho et al. let a worker read its own cache where the bound allows it; here it reads the newest weights in
    every step.

    Sources: Ho et al. 2013, "More Effective Distributed ML via a Stale Synchronous Parallel Parameter
    Server", section 2 (`slack` is s). Chen, Giannakis, Sun, Yin 2018, "LAG: Lazily Aggregated Gradient for
    Communication-Efficient Distributed Learning", arXiv:1805.09965, algorithm 1 with condition 15a
    (`threshold` is xi, `memory` is D).
    """

    # A host's centre lacks the other hosts' updates since its last exchange.
    most_levels: ClassVar[int] = 1

    slack: int = whole(3, "batches that a worker may be ahead of the slowest one", least=0)
    threshold: float = number(
        0.0, "how little a gradient may change to be kept (xi), with sgd; 0 sends all", least=0
    )
    memory: int = whole(10, "how many moves of the weights a change is compared with (D)")

    @override
    def rule(self, replica: Replica, optimizer: Optimizer, workers: int, clip: Clip) -> Rule:
        self.check_optimizer(optimizer)
        messages = [torch.zeros_like(flat.grads) for flat in replica.flats]
        return OptimizerRule(optimizer, replica, messages, keep=True)

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse, by `BadOption`, a threshold for optimizers whose moves do not follow the gradient."""
        if self.threshold and type(optimizer) is not optim.SGD:
            raise BadOption(
                f"option 'threshold' of strategy 'lazy' is {self.threshold}, which compares gradients with "
                f"the moves that SGD makes of them, but the optimizer is {type(optimizer).__name__}; use "
                "'--optimizer sgd', or '--strategy.threshold 0'"
            )

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        return _LazyWorker(self, replica, comm, optimizer, clip)


class _LazyWorker(CentredWorker):
    def __init__(
        self, strategy: Lazy, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip
    ) -> None:
        strategy.check_optimizer(optimizer)
        self._sent = [torch.zeros_like(flat.grads) for flat in replica.flats]
        self._optimizer_rule = OptimizerRule(optimizer, replica, self._sent, keep=True)
        super().__init__(replica, comm, self._optimizer_rule, optimizer, clip)
        self.private = {SENT: self._sent}
        self._strategy, self._workers, self._optimizer = strategy, comm.size, optimizer
        self._moves: deque[float] = deque(maxlen=strategy.memory)
        self._new = [torch.zeros_like(weights) for weights in self.weights]
        self._first, self._centre_has_sent = True, False
        self.restarts += ("the gradient that each worker has sent last",)

    @override
    @torch.no_grad()
    def step(self) -> None:
        missing = self.replica.gradients.missing()
        self.prepare()
        sends = self._first or missing != self._optimizer_rule.missing or self._must_send()
        self._first = False
        if sends:
            self._optimizer_rule.missing = missing
            copy_all(self._sent, self.grads)
        else:
            self.traffic.skipped += 1
        self.replica.zero_grad()
        pushed = self.centre.push(self._sent, again=self._centre_has_sent and not sends)
        self._centre_has_sent = True
        read = self._read()
        wait_s, sent_bytes = pushed.wait_s + read.wait_s, pushed.bytes_sent + read.bytes_sent
        self.count(replace(pushed, staleness=read.staleness, wait_s=wait_s, bytes_sent=sent_bytes))

    @override
    def state(self) -> State:
        state = super().state()
        missing = self._optimizer_rule.names_missing()
        state.own |= {"first": self._first, "moves": list(self._moves), "missing": missing}
        return state

    @override
    def load_state(self, saved: Saved) -> None:
        if saved.own is not None:
            self._first = saved.own["first"]
            self._moves.extend(saved.own["moves"])
            self._optimizer_rule.miss(saved.own["missing"])
        super().load_state(saved)

    @override
    def skip(self) -> None:
        """Count a round without a batch as a step, so that no other worker has to wait."""
        self.traffic.wait_s += self._read().wait_s

    def _read(self) -> Receipt:
        """Count a step, wait as the bound demands, and continue from the centre's weights."""
        receipt = self.centre.tick(self._strategy.slack, self._new)
        if self._strategy.threshold:
            self._moves.append(squared_distance(self._new, self.weights))
        copy_all(self.weights, self._new)
        return receipt

    def _must_send(self) -> bool:
        if not self._strategy.threshold:
            return True
        group = self._optimizer.param_groups[0]
        return is_worth_sending(
            squared_distance(self.grads, self._sent),
            self._moves,
            threshold=self._strategy.threshold,
            lr=float(group["lr"]) / (1 - group["momentum"]),
            workers=self._workers,
        )


def squared_distance(some: list[Tensor], others: list[Tensor]) -> float:
    """Return the square of the 2-norm of the difference."""
    pairs = zip(some, others, strict=True)
    return squared_norm(
        one - other
        for a, b in pairs
        for one, other in zip(torch.split(a, STRETCH), torch.split(b, STRETCH), strict=True)
    )


def is_worth_sending(
    change: float,  # |g_new - g_sent|^2
    moves: Iterable[float],  # |w_(k+1-d) - w_(k-d)|^2 for d = 1 .. D
    *,
    threshold: float,  # xi; 0 sends every gradient that has changed at all
    lr: float,  # eta, the step size of the centre
    workers: int,  # M
) -> bool:
    """Return whether a worker should send its new gradient, or let the centre use its last one again.

        send, unless  |g_new - g_sent|^2  <=  1 / (eta M)^2  *  sum over d of  xi * |w_(k+1-d) - w_(k-d)|^2

    Source: Chen et al. 2018 (see `Lazy`), condition 15a (LAG-WK), with all weights xi_d equal. The right
    side estimates the square of the whole gradient by how far the weights went lately: less change than that,
    and a stale gradient does no harm.
    """
    # The rate may be 0, as in a schedule: then no gradient moves anything, and none is worth sending.
    return change * (lr * workers) ** 2 > threshold * sum(moves)
