"""A synchronous parameter server, with backup workers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.parameter_server.rules import Rounds
from tutti.registry import part
from tutti.replica import Replica, copy_all
from tutti.state import Saved, State
from tutti.strategies.base import Clip, Pace, Worker
from tutti.strategies.centred import Centred, CentredWorker
from tutti.strategies.options import number


@part("paramserver")
@dataclass(frozen=True)
class ParamServer(Centred):
    """Synchronous training around a parameter server that waits for a quorum of the workers.

        G = mean of the gradients g_i(c) of the first workers that have `quorum` of a step's samples
        c = optimizer(c, clip(G)),  w_i = c for all whose gradient was used

    With `quorum` 1 every step waits for all, and the training equals one worker on the whole batch (as
    with `sync`); the centre keeps the gradients until then, and adds them up in the order of the workers, so
    that runs are bit-equal. With less, the slowest workers are backups: a gradient that comes after its step
    has closed is dropped (and counted), and its worker continues with the step that is open then.

        quorum 0.6   worker 0  │ g(c0) ─┐          │ g(c1) ─┐
                     worker 1  │ g(c0) ────┐       │ g(c1) ───┐
                     centre    c0         c1                  c2
                     worker 2  │     g(c0) ────────── dropped │ g(c2) ...

    A batch is split over the workers, and the gradients' mean is over their samples: workers without samples
    close no step, and only `quorum` 1 waits for them.

    Source: Chen, Pan, Monga, Bengio, Jozefowicz 2016, "Revisiting Distributed Synchronous SGD",
    arXiv:1604.00981, algorithms 3 and 4 (there the first N of N + b workers close a step, each with its own
    minibatch of the same size; so the mean is over N of them).
    """

    pace: ClassVar[Pace] = Pace.TOGETHER
    # The centre clips, and knows of one portion alone.
    joint_norm: ClassVar[bool] = False

    # A round closes everywhere at once.
    most_levels: ClassVar[int] = 1

    quorum: float = number(1.0, "share of a batch whose gradients close a step", above=0, most=1)

    @override
    def rule(self, replica: Replica, optimizer: Optimizer, workers: int, clip: Clip) -> Rounds:
        return Rounds(optimizer, replica, workers, self.quorum, clip.norm, clip.value)

    @override
    def worker(self, replica: Replica, comm: Communicator, optimizer: Optimizer, clip: Clip) -> Worker:
        rule = Rounds(optimizer, replica, comm.size, self.quorum, clip.norm, clip.value, comm.rank)
        return _ParamServerWorker(replica, comm, optimizer, rule)


class _ParamServerWorker(CentredWorker):
    def __init__(self, replica: Replica, comm: Communicator, optimizer: Optimizer, rule: Rounds) -> None:
        # The centre clips the whole gradient.
        super().__init__(replica, comm, rule, optimizer, Clip())
        self._rounds, self.share = rule, 1 / comm.size
        self.waits, self.restarts = rule.waits, ()

    @override
    def step(self) -> None:
        self._bring(self.share)

    @override
    def skip(self) -> None:
        """Bring nothing to a round, or leave out one that was closed without this worker."""
        self.replica.zero_grad()
        if not self.late:
            self._bring(0.0)
            return
        self._rounds.round += 1
        self.traffic.skipped += 1
        self.centre.pull(self.weights)

    def _bring(self, share: float) -> None:
        missing = self.replica.gradients.missing()
        self._rounds.missing = missing if share else frozenset(self._rounds.parameters)
        self._rounds.share = share
        self.prepare()
        receipt = self.centre.exchange(self.grads, self.weights)
        self._rounds.round += 1
        self.replica.zero_grad()
        # A worker without samples loses nothing.
        self.count(replace(receipt, dropped=receipt.dropped and share > 0))

    @property
    @override
    def late(self) -> bool:
        return self.centre.version > self._rounds.round

    @override
    def settle(self) -> None:
        """Agree, and train on from the centre's weights, which every worker has read."""
        super().settle()
        if self.settled:
            copy_all(self._aside, self.weights)

    @override
    def state(self) -> State:
        """Return the state of the centre's optimizer: between two rounds nothing else is left."""
        return State(joint=super().state().joint)

    @override
    def load_state(self, saved: Saved) -> None:
        self.centre.load_state(saved)
