"""The communication of a worker, recorded from the code of its strategy.

The code runs on one rank with stand-ins for the model, whose gradients are constant. Bytes are linear in the
size of the model: two stand-ins give the bytes of any model.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

import torch
from torch import nn

from tutti.comm.base import Servers
from tutti.errors import BadOption
from tutti.optim import build
from tutti.parameter_server.base import Centre
from tutti.strategies import Clip, Gossip, NoLoCo, Strategy, place
from tutti.strategies.base import Pace
from tutti.studies.simulate.recorder import CommOperation, Recorder, Unpredictable

LAYERS: Final = 64
"""Matrices of the stand-in for a model."""

UNIT: Final = 102_400
"""Parameters of the smaller stand-in for each rank of a host. Chunks and percentages of it are whole."""

FEW: Final = 4
"""If a worker receives messages of all others, recordings on FEW and 2 FEW hosts stand for more hosts."""

WITH_PEERS: Final = (Gossip, NoLoCo)
"""Strategies whose workers exchange with a few others; the partners are known for any size."""


@dataclass(frozen=True)
class Step:
    """A worker's communication in one step."""

    operations: tuple[CommOperation, ...]  # consecutive equal exchanges are one
    bytes_sent: float  # as the strategy counts them


@dataclass(frozen=True)
class StepSequence:
    """The communication of all steps: the first ones, then others that repeat."""

    first: tuple[Step, ...]
    repeated: tuple[Step, ...]

    def __getitem__(self, number: int) -> Step:
        late = number - len(self.first)
        return self.first[number] if late < 0 else self.repeated[late % len(self.repeated)]


@dataclass(frozen=True)
class CommPattern:
    """The communication of a strategy's workers."""

    strategy: Strategy
    optimizer: str  # a name; some cut the weights elsewhere, or send their learning rate
    parameters: int  # of the model, in float32
    servers: int  # the number of ranks that keep the centre, if the strategy has one

    @cached_property
    def period(self) -> int:
        """The steps after which the communication repeats."""
        every = (value for name, value in self.strategy.options().items() if name.endswith("every") and value)
        return math.lcm(self.strategy.period, *every)

    def steps(self, hosts: Sequence[int], count: int) -> StepSequence:
        """Return the communication of `count` steps on hosts with these numbers of ranks.

        Raises:
            BadOption: it depends on data, on shapes, or on the time of other workers.
        """
        first, *others = sorted(hosts)
        if isinstance(self.strategy, WITH_PEERS) and sum(hosts) % 2 and sum(hosts) > 1:
            # With one more rank, rank 0 has a partner in every round.
            *others, last = first, *others
            return _steps(self, (*others, last + 1), count)
        return _steps(self, (first, *others), count)


@lru_cache(maxsize=64)
def _steps(pattern: CommPattern, hosts: tuple[int, ...], count: int) -> StepSequence:
    options, period = pattern.strategy.options(), pattern.period
    settled = options.get("after", 0) + period
    try:
        if options.get("compress") == "power_sgd":
            raise Unpredictable("the bytes of power_sgd depend on the shapes of the model")
        if Centre in pattern.strategy.needs and pattern.strategy.pace is not Pace.FREE:
            raise Unpredictable("the answer of a server depends on other workers")
        taken = min(count, settled + 2 * period)
        steps = _recorded(pattern, hosts, taken)
        first, once, twice = steps[:settled], steps[settled : settled + period], steps[settled + period :]
        if twice != once[: len(twice)]:
            raise Unpredictable(f"its operations do not repeat after {period} steps")
    except Unpredictable as error:
        raise BadOption(
            f"strategy '{pattern.strategy.name}' has no fixed pattern of communication: {error}; simulate it "
            "with real gradients, without --timing"
        ) from error
    return StepSequence(tuple(first), tuple(once))


def _recorded(pattern: CommPattern, hosts: tuple[int, ...], count: int) -> list[Step]:
    """Record steps on these hosts, or on FEW and 2 FEW if each rank receives messages of all others."""
    few = _of_model(pattern, hosts[:FEW], count)
    if len(hosts) <= FEW:
        return few
    if not any(one.kind == "all_gather" for step in few for one in step.operations):
        return _of_model(pattern, hosts, count)
    share = (sum(hosts) - sum(hosts[:FEW])) / sum(hosts[FEW : 2 * FEW])
    return _between(few, _of_model(pattern, hosts[: 2 * FEW], count), share)


def _of_model(pattern: CommPattern, hosts: tuple[int, ...], count: int) -> list[Step]:
    """Record steps with two stand-ins, and return the steps of the model."""
    sizes = [UNIT * hosts[0], 2 * UNIT * hosts[0]]
    small, large = (_run(pattern, hosts, numbers, count) for numbers in sizes)
    return _between(small, large, (pattern.parameters - sizes[0]) / (sizes[1] - sizes[0]))


def _between(some: list[Step], others: list[Step], share: float) -> list[Step]:
    """Interpolate or extrapolate the bytes of two recordings."""
    found = []
    for one, other in zip(some, others, strict=True):
        if [a._replace(nbytes=0) for a in one.operations] != [b._replace(nbytes=0) for b in other.operations]:
            raise Unpredictable("its operations depend on the size of the model, or on the number of workers")
        pairs = zip(one.operations, other.operations, strict=True)
        operations = [a._replace(nbytes=max(0.0, a.nbytes + share * (b.nbytes - a.nbytes))) for a, b in pairs]
        sent = one.bytes_sent + share * (other.bytes_sent - one.bytes_sent)
        found.append(Step(tuple(operations), max(0.0, sent)))
    return found


def _run(pattern: CommPattern, hosts: tuple[int, ...], numbers: int, count: int) -> list[Step]:
    """Run steps of rank 0 alone with a stand-in of this size."""
    strategy, ranks = pattern.strategy, sum(hosts)
    operations: list[CommOperation] = []
    comm = Recorder(operations, hosts)
    if pattern.servers:
        every = Recorder(operations, (*hosts, pattern.servers), "servers")
        comm.servers = Servers(every, tuple(range(ranks, ranks + pattern.servers)))
    if strategy.groups(comm) is not None:
        raise Unpredictable("workers form groups")
    rows = numbers // LAYERS // 40
    module = nn.ParameterList(torch.zeros(rows, 40) for _ in range(LAYERS))
    optimizer = build(pattern.optimizer, [*module.parameters()], 1e-3)
    worker = strategy.worker(place(module, comm, strategy.home), comm, optimizer, Clip())
    worker.share = 1 / ranks if strategy.pace is Pace.TOGETHER else 1.0
    steps = []
    for _ in range(count):
        operations.clear()
        worker.traffic.take()
        for parameter in module.parameters():
            assert parameter.grad is not None
            parameter.grad.add_(1e-3)
        worker.step()
        if any(one.kind == "exchange" for one in operations) and not isinstance(strategy, WITH_PEERS):
            raise Unpredictable("its sums are made of messages between ranks")
        steps.append(Step(tuple(_joined(operations, ranks)), worker.traffic.bytes_sent))
    return steps


def _joined(operations: Sequence[CommOperation], ranks: int) -> list[CommOperation]:
    """Number the servers from 0, and join consecutive exchanges."""
    found: list[CommOperation] = []
    for one in operations:
        if one.kind == "exchange" and found and found[-1] == one:
            continue
        found.append(one._replace(peer=one.peer - ranks) if one.group == "servers" else one)
    return found
