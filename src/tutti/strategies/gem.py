"""Gradient energy matching: asynchronous workers that together move as SGD with momentum would."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.optim.sharded import ShardedOptimizer
from tutti.parameter_server.base import Rule
from tutti.parameter_server.rules import AddRule
from tutti.registry import part
from tutti.replica import Replica, copy_all
from tutti.strategies.base import Clip, Worker
from tutti.strategies.centred import Centred, CentredWorker
from tutti.strategies.options import number

MOMENT: Final = "moment"
"""The first word of the names of the proxy's momentum, in a checkpoint."""

READ: Final = "read_weights"
"""The first word of the names of the weights that a worker has read last."""


@part("gem")
@dataclass(frozen=True)
class GEM(Centred):
    """Gradient energy matching: each worker scales its update by the energy that the others have left.

        m = 0,  s = c
        for every batch:
            dw = optimizer(s, g(s)) - s                          the worker's update; -eta g with plain SGD
            w  = pull()                                          the centre now
            m  = momentum m + dw                                 what SGD with momentum would do
            pi = (amplification |m| - |w - s|) / (|dw| + 1e-16)  limited to least .. most, elementwise
            push(pi dw),  c = c + pi dw
            s  = w

    s is where the gradient was computed, w - s the centre's move by all workers since then (including this
    worker's last update), c the centre. The more the others have moved, the smaller is pi: the energy (half
    the square) of the centre's moves stays equal to m's.

        worker 0   s ─ backward ─ w, push ─ backward ─ w, push
        centre     c0 ──────────── c1 ─ c2 ──────────── c3
        worker 1   s ──── backward ────── w, push ─ backward ...

    The worker begins with the centre's first weights; each worker has its own batches. The paper's optimizer
    is plain SGD, as the proxy has the momentum; any other optimizer works too. Without limits (`least` -inf,
    `most` inf) this is the algorithm as printed, where an update may be reversed or grow without bound; the
    authors' program has the limits 0 and 5. That program also serves one worker at a time, from its pull to
    its push, and lets a worker continue from w + pi dw; here others may come between the two, and a worker
    continues from w, as printed.

    Source: Hermans, Louppe 2018, "Gradient Energy Matching for Distributed Asynchronous Gradient Descent",
    arXiv:1805.08469, algorithm 1; `amplification` is kappa of appendix B, equation 27.
    """

    momentum: float = number(0.9, "momentum (mu) of the proxy whose energy is matched", least=0, below=1)
    amplification: float = number(1.0, "how much larger than the proxy's the moves may be (kappa)", above=0)
    least: float = number(0.0, "the smallest scale of an update", least=-math.inf, most=1)
    most: float = number(5.0, "the largest scale of an update", least=1, most=math.inf)

    @override
    def rule(self, replica: Replica, optimizer: Optimizer, workers: int, clip: Clip) -> Rule:
        return AddRule()

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        return _GemWorker(self, replica, comm, optimizer, clip)


class _GemWorker(CentredWorker):
    def __init__(
        self, strategy: GEM, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip
    ) -> None:
        rule = strategy.rule(replica, optimizer, comm.size, clip)
        steps = ShardedOptimizer(optimizer, replica)
        super().__init__(replica, comm, rule, optimizer, clip, steps)
        self._options: dict[str, Any] = strategy.options()
        self._then = [weights.clone() for weights in self.weights]
        self._moments = [torch.zeros_like(weights) for weights in self.weights]
        self.private = {READ: self._then, MOMENT: self._moments}
        self._updates = [torch.zeros_like(weights) for weights in self.weights]

    @override
    @torch.no_grad()
    def step(self) -> None:
        self.move()
        for update, weights, then in zip(self._updates, self.weights, self._then, strict=True):
            torch.sub(weights, then, out=update)
        pulled = self.centre.pull(self.weights)
        parts = zip(self._updates, self._moments, self.weights, self._then, strict=True)
        for update, moment, weights, then in parts:
            match_energy(update, moment, weights, then, **self._options)
        pushed = self.centre.push(self._updates)
        copy_all(self._then, self.weights)
        wait_s, sent = pulled.wait_s + pushed.wait_s, pulled.bytes_sent + pushed.bytes_sent
        self.traffic.add(sent, wait_s, pulled.staleness, pulled.age_s)


def match_energy(
    update: Tensor,  # dw = -eta * gradient; overwritten
    moment: Tensor,  # m, zeros at first; updated in place
    centre: Tensor,  # w, the centre's weights now
    then: Tensor,  # s, the centre's weights at which the gradient was computed
    *,
    momentum: float,  # mu
    amplification: float = 1.0,  # kappa
    least: float = 0.0,  # below 0, an update may be reversed
    most: float = 5.0,
    epsilon: float = 1e-16,
) -> None:
    """Scale an update so that it moves the centre, with the others' moves, as SGD with momentum would.

        m  = mu m + dw
        pi = (kappa |m| - |w - s|) / (|dw| + epsilon),  limited to least .. most
        dw = pi * dw                                                     (all elementwise)

    Source: algorithm 1 of the paper of `GEM`; `amplification` is kappa of appendix B, equation 27. The limits
    are those of the authors' program, 0 and 5, "for numerical stability".

    The kinetic energy of a move is half its square. |m| is what the proxy, SGD with momentum, would have
    moved; |w - s| is what all workers have moved the centre since this one read it; the rest of the proxy's
    energy is left for the update.
    """
    moment.mul_(momentum).add_(update)
    room = moment.abs().mul_(amplification).sub_((centre - then).abs_())
    # In fp32 an epsilon of 1e-16 matters only where the update is zero.
    scale = room.div_(update.abs().add_(epsilon)).clamp_(least, most)
    update.mul_(scale)
