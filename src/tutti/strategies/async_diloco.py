"""Asynchronous DiLoCo: workers send outer gradients to a centre, which applies its momentum with a delay."""

from __future__ import annotations

import math
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
from tutti.parameter_server.connect import workers_of_centre
from tutti.parameter_server.remote import RemoteCentre, read_key
from tutti.parameter_server.rules import DelayedNesterovRule
from tutti.registry import part
from tutti.replica import Replica, copy_all
from tutti.state import Saved, State
from tutti.strategies.base import Clip, Worker
from tutti.strategies.centred import Centred, CentredWorker
from tutti.strategies.options import choice, number, text, whole

ANCHOR: Final = "read_weights"
"""The first word of the names of the centre's weights from which a worker's round began."""


@part("async_diloco")
@dataclass(frozen=True)
class AsyncDiLoCo(Centred):
    """DiLoCo whose workers never wait for each other: each brings its outer gradient to a centre.

        worker i:   x_i = a_i = c                            it reads the centre
                    H_i times:  x_i = optimizer(x_i, g_i)    with its own batches; the paper's is AdamW
                    d = a_i - x_i                            its outer gradient, which it brings
        centre:     s = s + d,  c = c - outer_lr d / N       with each message
                    v = outer_momentum v + s / N             with each N-th (`delay`), then s = 0 and
                    c = c - outer_lr outer_momentum v

    Nesterov's momentum in each message would repeat stale outer gradients; here it waits for N of them
    (delayed Nesterov). With N = 1 and one worker this is DiLoCo. A message is still about a round late, so
    the momentum should be smaller than DiLoCo's 0.9 where a round takes the weights far.

        worker 0   │ step │ step │ step │ d0 ─▶ c, read │ step │ step │ step │ d0 ─▶ c ...
        centre                               c1 ─────────── c2
        worker 1   │    step   │    step   │    step   │ d1 ─▶ c, read │    step   │ ...
                                                          staleness 1: c1 came in between

    H_i is `every` for the fastest worker, and with `dynamic` fewer for the others, so that all rounds take
    about as long (dynamic local updates):

        H_i = floor(every s_i / max over j of s_j)           s_i: batches per second of worker i

    The paper recomputes H_i in each round; here it is recomputed at each evaluation, checkpoint and end of an
    epoch, when the workers meet anyway, from the time between exchanges since the last one. The centre is
    evaluated and kept. After its last step a worker sends its unfinished round, so that no step is lost.

    With `centre` the workers are separate runs, on any machines, and the centre is a process, `tutti centre`.
    A worker that is lost, stopped or cut off delays no other. While it cannot reach the centre, its round
    continues; after a restart it takes the centre's weights and begins a round. Each run computes `dynamic`
    from its own ranks only. Frozen parameters and buffers are each run's own.

    No message is held back to be applied with others (the paper's grace period), and a worker's optimizer
    keeps its state from round to round. The authors' notebook (google-deepmind/asyncdiloco) begins a new
    inner optimizer in each round, has the grace period, and shows two other centres: one with Nesterov's
    momentum in each message, and one that waits for N messages. The paper's momentum activation c is its
    default, 0.

    Source: Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling", arXiv:2401.09135,
    algorithm 3 (delayed Nesterov) and equation 6 (dynamic local updates); there `every` is H.
    """

    every: int = whole(20, "batches of the fastest worker between two exchanges")
    outer_lr: float = number(0.7, "learning rate of the outer steps", above=0)
    outer_momentum: float = number(0.5, "Nesterov momentum of the outer steps", least=0, below=1)
    delay: int = whole(0, "outer gradients for one step of the momentum; 0: the number of workers", least=0)
    dynamic: bool = choice(True, "whether slower workers make fewer batches in a round", (True, False))
    centre: str = text("HOST:PORT of a 'tutti centre', which workers of several runs share")
    key: str = text("file with the key of that centre; by default TUTTI_CENTRE_KEY is the key")

    @override
    def check(self, workers: int, hosts: int = 1, servers: int = 0, levels: int = 1) -> None:
        super().check(workers, 1 if self.centre else hosts, servers, levels)
        if self.centre and servers:
            raise BadOption(f"{self.as_given('centre')}, and servers are none of its; leave --servers out")

    @property
    @override
    def period(self) -> int:
        return self.every

    @override
    def rule(self, replica: Replica, optimizer: Optimizer, workers: int, clip: Clip) -> Rule:
        return DelayedNesterovRule(replica.flats, self.outer_lr, self.outer_momentum, self.delay or workers)

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        return _AsyncDiLoCoWorker(self, replica, comm, optimizer, clip)


class _AsyncDiLoCoWorker(CentredWorker):
    def __init__(
        self, strategy: AsyncDiLoCo, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip
    ) -> None:
        rule = strategy.rule(replica, optimizer, workers_of_centre(comm), clip)
        steps, centre = ShardedOptimizer(optimizer, replica), None
        if strategy.centre:
            settings = strategy.outer_lr, strategy.outer_momentum, strategy.delay
            centre = RemoteCentre(comm, replica.flats, settings, strategy.centre, read_key(strategy.key))
        super().__init__(replica, comm, rule, optimizer, clip, steps, centre)
        self._strategy, self._comm = strategy, comm
        self._anchors = [weights.clone() for weights in self.weights]
        self.private = {ANCHOR: self._anchors}
        self._round, self._batches = strategy.every, 0
        self._made, self._busy_s, self._began = 0, 0.0, comm.clock()

    @override
    @torch.no_grad()
    def step(self) -> None:
        self.move()
        self._batches += 1
        self._made += 1
        if self._batches >= self._round and self.centre.ready:
            self._busy_s += self._comm.clock() - self._began
            self.count(self.centre.exchange(self._outer_gradient(), self.weights))
            copy_all(self._anchors, self.weights)
            self._batches = 0
            self._began = self._comm.clock()

    def _outer_gradient(self) -> list[Tensor]:
        """Return anchors - weights, in the memory of the anchors."""
        return [anchor.sub_(own) for anchor, own in zip(self._anchors, self.weights, strict=True)]

    @override
    def settle(self) -> None:
        self._busy_s += self._comm.clock() - self._began
        super().settle()
        if self._strategy.dynamic:
            self._choose_round()
        self._made, self._busy_s = 0, 0.0

    def _choose_round(self) -> None:
        """Choose the batches of a round from all workers' speeds since the last time (collective)."""
        seconds = torch.zeros(self._comm.size, dtype=torch.float64)
        own = self._busy_s / self._made if self._made else math.inf
        seconds[self._comm.rank] = own
        self._comm.all_gather(seconds)
        if self._made:
            self._round = local_steps(self._strategy.every, own, float(seconds.min()))

    @override
    def resume(self) -> None:
        super().resume()
        self._began = self._comm.clock()

    @override
    @torch.no_grad()
    def flush(self) -> None:
        """Bring the outer gradient of the unfinished round, and what the centre may lack of the last."""
        if self._batches or not self.centre.ready:
            self.count(self.centre.push(self._outer_gradient()))

    @override
    def state(self) -> State:
        state = super().state()
        state.own |= {"batches": self._batches, "round": self._round}
        return state

    @override
    def load_state(self, saved: Saved) -> None:
        if self._strategy.centre:
            return  # That centre has moved since, and this worker has its weights.
        super().load_state(saved)
        if saved.own is not None:
            self._batches, self._round = saved.own["batches"], saved.own["round"]


def local_steps(every: int, own_s: float, fastest_s: float) -> int:
    """Return the batches of a worker's round, so that it takes as long as the fastest worker's.

        H_i = floor(H s_i / max over j of s_j)               at least 1

    `own_s` and `fastest_s` are seconds per batch, 1 / s. Source: equation 6 of the paper of `AsyncDiLoCo`.
    """
    if own_s <= fastest_s:
        return every
    return max(1, math.floor(every * fastest_s / own_s + 1e-6))  # clocks are rounded
