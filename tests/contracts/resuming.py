"""Courses that leave their state in the middle of an epoch, and others that go on from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.contracts.training import SPEEDS, adamw, clouds, laid_out
from tests.states import saved_by
from tutti.comm.base import Communicator
from tutti.optim.state import load, options_of
from tutti.replica import Replica
from tutti.state import LocalState, Saved, State, Values
from tutti.strategies import Clip, Strategy, Worker
from tutti.strategies.base import Pace
from tutti.strategies.centred import Centred

STOP, END = 5, 9
"""The number of steps before the state is taken, and of all: neither is a multiple of a strategy's period."""

SAMPLES = 12
"""Of one batch."""


class Branching(nn.Module):
    """A model of which a part gets no gradient in some steps, and a parameter has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.side, self.last = nn.Linear(6, 7), nn.Linear(6, 7), nn.Linear(7, 3)
        self.nothing = nn.Parameter(torch.zeros(0))
        self.both = True

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x) + self.side(x) if self.both else self.first(x)
        return self.last(torch.tanh(inner)) + self.nothing.sum()


@dataclass(frozen=True)
class Course:
    """What is trained, and how. Everything in it can be sent to another process."""

    strategy: Strategy
    model: Callable[[], nn.Module] = Branching
    optimizer: Callable[[Sequence[nn.Parameter]], Optimizer] = adamw
    dtype: torch.dtype = torch.float32
    steps: int = END
    late: bool = False  # a part of the model gets its first gradient after the stop
    in_turn: bool = False  # one worker steps after the other, so that runs of processes repeat themselves


@dataclass(frozen=True)
class Checkpoint:
    """What is kept of all ranks: a state for each of those that go on."""

    weights: dict[str, Tensor]
    options: list[Values]
    saved: list[Saved]


@dataclass(frozen=True)
class Left:
    """What one rank leaves in the middle, and what it has in the end."""

    weights: dict[str, Tensor]  # agreed on when the state is taken
    options: list[Values]  # of the optimizer
    state: State  # of the worker
    final: Tensor  # weights in the end
    staleness: dict[int, int]  # of its exchanges after the stop: how often each was seen


@dataclass(frozen=True)
class Resumed:
    """What one rank has that goes on."""

    weights: dict[str, Tensor]  # evaluated before its first step
    state: State  # of the worker at that moment
    restarts: tuple[str, ...]  # what the worker says is lost at another number of ranks
    final: Tensor  # weights in the end
    staleness: dict[int, int]  # of its exchanges


def checkpoint(left: Sequence[Left | None], ranks: int | None = None) -> Checkpoint:
    """Put together what all ranks have left, for as many ranks or another number."""
    workers = [one for one in left if one is not None]
    return Checkpoint(workers[0].weights, workers[0].options, saved_by([one.state for one in workers], ranks))


def begin(comm: Communicator, course: Course) -> Left | None:
    """One rank's part in a course from the beginning to the end (collective); a server leaves nothing."""
    torch.manual_seed(0)
    module = course.model().to(course.dtype)
    optimizer = course.optimizer(list(module.parameters()))
    if _serves(comm, course, module, optimizer):
        return None
    replica, worker, _ = laid_out(module, comm, course.strategy, optimizer)
    _train(comm, course, replica, worker, optimizer, range(STOP))
    comm.barrier()
    worker.settle()
    weights, state, options = deepcopy((module.state_dict(), worker.state(), options_of(optimizer)))
    worker.resume()
    comm.barrier()
    worker.settle()
    worker.resume()
    comm.barrier()
    worker.traffic.take()
    _train(comm, course, replica, worker, optimizer, range(STOP, course.steps))
    final = _finished(comm, course, replica, worker)
    return Left(weights, options, state, final, worker.traffic.take().staleness)


def go_on(comm: Communicator, course: Course, kept: Checkpoint | None) -> Resumed | None:
    """The second part of a course by another rank, made anew (collective); a server needs no checkpoint."""
    torch.manual_seed(1 + comm.rank)
    module = course.model().to(course.dtype)
    optimizer = course.optimizer(list(module.parameters()))
    if _serves(comm, course, module, optimizer):
        return None
    assert kept is not None
    module.load_state_dict(kept.weights)
    saved = kept.saved[comm.rank]
    names = {parameter: name for name, parameter in module.named_parameters()}
    load(optimizer, names, saved, kept.options)
    replica, worker, _ = laid_out(module, comm, course.strategy, optimizer)
    worker.load_state(saved)
    comm.barrier()
    worker.settle()
    weights, state = deepcopy(module.state_dict()), deepcopy(worker.state())
    worker.resume()
    comm.barrier()
    _train(comm, course, replica, worker, optimizer, range(STOP, course.steps))
    final = _finished(comm, course, replica, worker)
    return Resumed(weights, state, worker.restarts, final, worker.traffic.take().staleness)


def differences(left: Left, resumed: Resumed) -> list[str]:
    """Name what another rank has otherwise than it was when the state was taken, to the bit."""
    pairs = [("weights", left.weights, resumed.weights)]
    for part in ("joint", "alone"):
        before, after = getattr(left.state, part), getattr(resumed.state, part)
        pairs += [(part, _pieces(before), _pieces(after)), (part, before.numbers, after.numbers)]
    pairs += [(part, getattr(left.state, part), getattr(resumed.state, part)) for part in ("shared", "own")]
    return [name for path, before, after in pairs for name in _differences(path, before, after)]


def _pieces(held: LocalState) -> dict[str, Any]:
    return {
        f"{piece.name}[{piece.start}:{piece.stop}]": [piece.values, piece.shape, piece.order]
        for piece in held.pieces
    }


def _differences(path: str, before: Any, after: Any) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in before | after:
            if name in before and name in after:
                yield from _differences(f"{path}/{name}", before[name], after[name])
            else:
                yield f"{path}/{name} ({'lost' if name in before else 'new'})"
    elif isinstance(before, list | tuple) and isinstance(after, list | tuple) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from _differences(f"{path}/{number}", one, other)
    elif isinstance(before, Tensor) and isinstance(after, Tensor):
        if before.dtype != after.dtype or not torch.equal(before, after):
            yield path
    elif before != after:
        yield f"{path} ({before} -> {after})"


def _serves(comm: Communicator, course: Course, module: nn.Module, optimizer: Optimizer) -> bool:
    if comm.servers is None or not comm.servers.serving:
        return False
    assert isinstance(course.strategy, Centred)
    course.strategy.serve(comm.servers, Replica(module), optimizer, Clip())
    return True


def _train(
    comm: Communicator, course: Course, replica: Replica, worker: Worker, optimizer: Optimizer, steps: range
) -> None:
    (training, _), rank, size = clouds(), comm.rank, comm.size
    together = course.strategy.pace is Pace.TOGETHER
    worker.share = 1 / size if together else 1.0
    for step in steps:
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
        replica.module.both = step >= STOP if course.late else step not in (2, STOP - 1, STOP)
        if worker.late:
            worker.skip()
            continue
        batches = SAMPLES * torch.arange(step, step + 1) if together else SAMPLES * (size * step + rank)
        chosen = (batches + torch.arange(SAMPLES)) % len(training)
        if together:
            chosen = chosen.tensor_split(size)[rank]
        inputs, targets = training.take(chosen)
        loss = nn.functional.cross_entropy(replica.module(inputs.to(course.dtype)), targets)
        (loss * worker.share).backward()
        comm.compute(SAMPLES * SPEEDS[rank % len(SPEEDS)])
        _in_turn(comm, worker.step) if course.in_turn else worker.step()


def _in_turn(comm: Communicator, step: Callable[[], object]) -> None:
    """Step while all others wait (collective)."""
    comm.barrier()
    for turn in range(comm.size):
        if turn == comm.rank:
            step()
        comm.barrier()


def _finished(comm: Communicator, course: Course, replica: Replica, worker: Worker) -> Tensor:
    found = []
    if course.in_turn:  # In the end each brings what is left when it comes to that: so look before.
        comm.barrier()
        found += [flat.weights.clone() for flat in replica.flats]
        comm.barrier()
        worker.settle()
        found += [flat.weights.clone() for flat in replica.flats]
        worker.resume()
        comm.barrier()
    worker.finish()
    found = found or [flat.weights.clone() for flat in replica.flats]
    comm.barrier()
    return torch.cat(found)


momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
plain = partial(torch.optim.SGD, lr=0.1)
