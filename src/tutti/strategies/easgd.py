"""Elastic averaging SGD: workers train on their own and are tied to a centre by springs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.optim.sharded import ShardedOptimizer
from tutti.parameter_server.base import Rule
from tutti.parameter_server.connect import workers_of_centre
from tutti.parameter_server.rules import ElasticRule
from tutti.registry import part
from tutti.replica import Replica
from tutti.state import Saved, State
from tutti.strategies.base import Clip, Worker
from tutti.strategies.centred import Centred, CentredWorker
from tutti.strategies.options import number, whole


@part("easgd")
@dataclass(frozen=True)
class EASGD(Centred):
    """Asynchronous elastic averaging: every `every` batches a worker and the centre attract each other.

        if every divides t:   d = alpha (x - c),   x = x - d,   c = c + d        alpha = force / workers
        x = optimizer(x, g)                                                      g from before the pull

    With torch's SGD with Nesterov's momentum v it is EAMSGD, except that x + delta v is exchanged instead of
    x.

    Between exchanges the workers explore independently, each with its own batches; the centre c is evaluated
    and kept. After its last step a worker exchanges once more (the paper's loop has no end), so that no step
    is lost.

        worker 0   │ step │ step │ step │ x0 ◀─▶ c, step │ step │ ...
        centre                             c ─────────────── c
        worker 1   │ step   │ step   │ step   │ step   │ x1 ◀─▶ c, step   │ ...

    Here worker and centre move as one operation, before the worker's step. In the author's program
    (sixin-zh/mpiT) the worker moves after its step, and the centre when the message arrives; its moving rate
    is alpha, as is the elastic force of mpi_learn, which exchanges after a step.

    With two levels of centres, each has its own alpha: force / workers of the host, and force / hosts.

    Source: Zhang, Choromanska, LeCun 2015, "Deep learning with Elastic Averaging SGD", arXiv:1412.6651,
    algorithms 1 (EASGD) and 2 (EAMSGD); there `every` is tau, `force` is beta.
    """

    every: int = whole(10, "batches of a worker between two exchanges")
    force: float = number(0.9, "how hard workers and centre pull at each other", above=0, most=1)

    @property
    @override
    def period(self) -> int:
        return self.every

    @override
    def rule(self, replica: Replica, optimizer: Optimizer, workers: int, clip: Clip) -> Rule:
        return ElasticRule(self.force, workers)

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        return _EasgdWorker(self, replica, comm, optimizer, clip)


class _EasgdWorker(CentredWorker):
    def __init__(
        self, strategy: EASGD, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip
    ) -> None:
        rule = strategy.rule(replica, optimizer, workers_of_centre(comm), clip)
        super().__init__(replica, comm, rule, optimizer, clip, ShardedOptimizer(optimizer, replica))
        self._every, self._batches = strategy.every, 0

    @override
    @torch.no_grad()
    def step(self) -> None:
        if self._batches % self._every == 0:
            self._exchange()
        self._batches += 1
        self.move()

    def _exchange(self) -> None:
        self.count(self.centre.exchange(self.weights))

    @override
    @torch.no_grad()
    def flush(self) -> None:
        """Exchange once more, for the steps since the last exchange."""
        if self._batches:
            self._exchange()

    @override
    def state(self) -> State:
        state = super().state()
        state.own["batches"] = self._batches
        return state

    @override
    def load_state(self, saved: Saved) -> None:
        super().load_state(saved)
        self._batches = 0 if saved.own is None else saved.own["batches"]
