"""The recovery of a run whose ranks are lost, in one process: every crew of ranks is a virtual world.

What the ranks do is the real thing: training, copies of the state in memory, going on from them. The test
stands in for the process that starts them: it has the memory, sees who is lost, and starts the next crew.

    crew 0   train, copy, train ✝         killed at an operation; the others are ended with it
    crew 1             load, train ✝      perhaps again, before or behind its first step
    crew 2             load, train ...    ends with the weights of the undisturbed run

    python -m tests.run.recovery          explores far more than the tests do
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cache
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim import SGD
from typing_extensions import override

from tests.trainers import trainer_of
from tutti.checkpoint.memory_files import _FILES, MemoryPlace, StateCopy, StateMemory
from tutti.checkpoint.reading import kept_in
from tutti.checkpoint.saver import MemorySaver
from tutti.comm.virtual.communicator import VirtualCommunicator
from tutti.comm.virtual.world import Fault, VirtualWorld
from tutti.data.batches import Batches
from tutti.data.parts import Part
from tutti.errors import PeerLost
from tutti.optim.state import load
from tutti.run.restore import load_model
from tutti.state import State
from tutti.strategies import STRATEGIES, Clip, Strategy
from tutti.strategies.base import Pace
from tutti.strategies.placement import place
from tutti.training.agenda import Agenda, Decision, Wishes
from tutti.training.losses import LOSSES
from tutti.training.precision import Arithmetic

SAMPLES, BATCH, EPOCHS = 16, 4, 2
OPTIONS: dict[str, dict[str, int]] = {"diloco": {"every": 2}, "local": {"every": 2}, "easgd": {"every": 2}}
POLICIES = {"respawn": 0, "shrink": -1, "grow": 1}
"""So many ranks more has the next crew. Those before it die at any time, also if more are asked for."""

INPUTS = torch.linspace(-1, 1, 3 * SAMPLES, dtype=torch.float64).reshape(SAMPLES, 3).sin()
TARGETS = (INPUTS[:, 0] > 0).long()


def made(name: str) -> Strategy:
    """Make a strategy whose workers exchange something in as few steps as there are here."""
    return STRATEGIES[name](**OPTIONS.get(name, {}))


class Halted(Exception):
    """The end of a crew that a replay ends where a copy was taken."""


class Often(Agenda):
    """Has a copy taken each time that the ranks look whether one is due."""

    @override
    def note_copy(self, seconds: float) -> None:
        return


class CutPlace(MemoryPlace):
    """The address of a memory; to publish a copy takes three operations, and a rank may die at each."""

    rank: VirtualCommunicator

    @override
    def publish(self, copy: StateCopy) -> None:
        self.rank._begin("publish: nothing is written")
        self._write(_FILES + copy.number, b"")
        self.rank._begin("publish: the description is being written")
        super().publish(copy)
        self.rank._begin("publish: the description is written")


@dataclass(frozen=True)
class Kill:
    """The death of a rank of a crew, at one of its operations."""

    rank: int
    operation: int


@dataclass
class Finished:
    """The end of a run."""

    weights: list[Tensor]  # of each rank
    samples: list[int]  # of each epoch
    crews: list[tuple[int, int | None]]  # the ranks between two losses, and the copy they began with
    operations: list[list[int]]  # of each last rank, begun up to each of its steps; first 0


@dataclass
class Supervisor:
    """The ranks between two losses."""

    strategy: str
    memory: StateMemory
    halt: int | None = None  # the number of the copy after which it is halted
    operations: dict[int, list[int]] = field(default_factory=dict)

    def work(self, comm: VirtualCommunicator) -> tuple[Tensor, list[int]]:
        """Continue from the last copy, if there is one, and train to the end."""
        strategy, begun = made(self.strategy), self.operations.setdefault(comm.rank, [0])
        torch.manual_seed(0)
        module = nn.Linear(3, 2).double()
        optimizer = SGD(module.parameters(), lr=0.3, momentum=0.9)
        checkpoint = kept_in(comm, self.memory.place)
        saved = None if checkpoint is None else checkpoint.saved(comm.rank, comm.size)
        if saved is not None:
            load_model(module, saved)
            names = {parameter: name for name, parameter in module.named_parameters()}
            options = (saved.own or saved.shared)["training"]["schedule"]["options"]
            load(optimizer, names, saved, options, copy=True)
        here = self.memory.place
        cut = CutPlace(here.page, here.copies, here.data)
        object.__setattr__(cut, "rank", comm)
        own, replica = strategy.pace is not Pace.TOGETHER, place(module, comm, strategy.home)
        free = strategy.pace is Pace.FREE
        wishes = Wishes(copies=lambda: False, free=free, period=strategy.period, now=lambda: 0.0)
        taken = here.last.taken
        with closing(MemorySaver(comm, cut)) as saver:

            def save(step: int, state: State, decision: Decision) -> None:
                nonlocal taken
                saver.save(step, state, {})
                taken += 1
                if taken == self.halt:
                    raise Halted

            trainer = trainer_of(
                comm=comm,
                replica=replica,
                worker=strategy.worker(replica, comm, optimizer, Clip()),
                optimizer=optimizer,
                loss=LOSSES["cross_entropy"],
                metrics=[],
                arithmetic=Arithmetic("fp64"),
                batches=Batches(
                    Part(INPUTS, TARGETS), BATCH // (2 if own else 1), comm.rank, comm.size, own=own
                ),
                epochs=EPOCHS,
                agenda=Often(comm, wishes),
                save=save,
                on_step=lambda _: begun.append(comm._task.operations),
                seconds_per_sample=1e-3,
            )
            history = trainer.fit(saved)
        begun.append(comm._task.operations)
        return torch.cat([p.detach().flatten() for p in module.parameters()]), [
            one.train.samples for one in history
        ]


def run(strategy: str, ranks: int, policy: str, kills: Sequence[Kill] = ()) -> Finished:
    """Train, while each crew but the last loses a rank: `kills` has one for each of these."""
    crews: list[tuple[int, int | None]] = []
    with closing(StateMemory()) as memory:
        for kill in chain(kills, [None]):
            crew, begun_at = Supervisor(strategy, memory), memory.place.last.taken or None
            faults = [] if kill is None else [Fault(kill.rank, operation=kill.operation)]
            world = VirtualWorld(ranks, faults=faults)
            try:
                found = world.run(crew.work)
            except PeerLost:
                assert world.lost, "no rank was killed"
            crews.append((ranks, begun_at))
            if not world.lost:
                weights, samples = [one for one, _ in found], found[0][1]
                return Finished(weights, samples, crews, [crew.operations[rank] for rank in range(ranks)])
            ranks += POLICIES[policy]
    raise AssertionError("the last crew has lost a rank, whom nobody has killed")


@cache
def replayed(strategy: str, crews: tuple[tuple[int, int | None], ...]) -> tuple[Tensor, list[int]]:
    """Train with the crews of a log, each of which is halted where the next one has gone on from."""
    # A crew that no copy is left of has done nothing that counts.
    first = max((number for number, (_, copy) in enumerate(crews) if copy is None), default=0)
    with closing(StateMemory()) as memory:
        for number in range(first, len(crews)):
            ranks, _ = crews[number]
            halt = crews[number + 1][1] if number + 1 < len(crews) else None
            if halt is not None and halt == crews[number][1]:
                continue  # It was lost before a copy of its own.
            try:
                found = VirtualWorld(ranks).run(Supervisor(strategy, memory, halt).work)
            except Halted:
                continue
    return found[0]


def check(strategy: str, ranks: int, policy: str, kills: Sequence[Kill]) -> Finished:
    """Hold a run that loses ranks to its replay, and to the undisturbed one where it has to equal that."""
    found = run(strategy, ranks, policy, kills)
    where = f"{strategy}, {policy}, {ranks} ranks, {kills}: crews {found.crews}"
    weights, samples = replayed(strategy, tuple(found.crews))
    for one in found.weights:
        assert torch.equal(one, weights), f"other weights than those of a replay: {where}"
    assert found.samples == samples == [SAMPLES] * EPOCHS, f"samples {found.samples}: {where}"
    pace = STRATEGIES[strategy].pace
    if pace is Pace.TOGETHER or (pace is Pace.ABREAST and policy == "respawn"):
        alone = replayed(strategy, ((ranks, None),))[0]
        # Other ranks add up the same gradients in another order.
        most = 0.0 if policy == "respawn" else 1e-12
        assert float((weights - alone).abs().max()) <= most, (
            f"not the weights of the undisturbed run: {where}"
        )
    return found


def operations(strategy: str, ranks: int) -> Iterator[Kill]:
    """Yield a death of each rank at each of its operations in the undisturbed run."""
    for rank, of_steps in enumerate(run(strategy, ranks, "respawn").operations):
        yield from (Kill(rank, number) for number in range(of_steps[-1]))


def explore(strategy: str, ranks: int, policy: str, stride: int = 1) -> int:
    """Have each rank die at each of its operations, or at every so many; returns the number of deaths."""
    kills = list(operations(strategy, ranks))[::stride]
    for kill in kills:
        check(strategy, ranks, policy, [kill])
    return len(kills)


def explore_recovery(strategy: str, ranks: int, policy: str, first: Kill, stride: int = 1) -> int:
    """Have each rank of the crew after a death die, too, at each operation until its first step is done.

    Returns:
        The number of second deaths.
    """
    begun, count = check(strategy, ranks, policy, [first]).operations, 0
    for rank, of_steps in enumerate(begun):
        # A worker that waits for nobody may find that the others have done all.
        for number in range(rank % stride, of_steps[:3][-1], stride):
            check(strategy, ranks, policy, [first, Kill(rank, number)])
            count += 1
    return count
