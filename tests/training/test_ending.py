"""Runs that end by what their epochs have reached, and the weights that they leave."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.optim import SGD

from tests.contracts.strategy import NAMES, brisk, world
from tests.contracts.training import SPEEDS, clouds, normed
from tests.states import saved_by
from tests.trainers import trainer_of
from tests.training.test_validation import no_process_is_left  # noqa: F401  It is a fixture.
from tutti.comm.base import Communicator
from tutti.comm.shm.communicator import HostCommunicator
from tutti.data import Batches
from tutti.records.run import EpochRecord, Evaluation
from tutti.replica import Replica
from tutti.state import Saved, State
from tutti.strategies import STRATEGIES, Clip, Strategy
from tutti.strategies.base import Pace
from tutti.strategies.placement import place
from tutti.training.agenda import COPY_SHARE, Agenda, Decision, Wishes
from tutti.training.evaluation import Objective, evaluate
from tutti.training.intervals import Averaging
from tutti.training.losses import LOSSES
from tutti.training.metrics import METRICS
from tutti.training.stopping import Ending, Monitor

OBJECTIVE = Objective(LOSSES["cross_entropy"], [METRICS["accuracy"]])


MONITOR = Monitor()


@dataclass(frozen=True)
class Run:
    """What is trained, and until when."""

    strategy: Strategy
    epochs: int = 6
    lr: float = 0.1
    monitor: Monitor = MONITOR
    patience: int | None = None
    ends_after: int | None = None
    restores_best: bool = False
    validate: str = "pause"
    stops_at: int | None = None
    ranks: int = 3
    average: str | None = None


@dataclass(frozen=True)
class Ended:
    """What a rank has in the end; `found` is what it finds of the validation part then."""

    history: list[EpochRecord]
    weights: dict[str, Tensor]
    found: Evaluation
    why: str | None
    final: Evaluation | None
    restored: EpochRecord | None
    written: dict[str, Tensor]
    seen: list[int]
    states: list[State]


def train(comm: Communicator, run: Run, saved: Sequence[Saved] = ()) -> Ended:
    """One rank's part in a run, or in the rest of one that has stopped."""
    torch.manual_seed(0)
    module, own = normed(), run.strategy.pace is not Pace.TOGETHER
    training, validation = clouds(96)
    if saved:
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                parameter.copy_(saved[comm.rank].joint.tensors[f"weights/{name}"])
    optimizer = SGD(module.parameters(), lr=run.lr)
    replica: Replica = place(module, comm, run.strategy.home)
    seen: list[int] = []
    written: dict[str, Tensor] = {}

    def state() -> dict[str, Tensor]:
        return {name: value.clone() for name, value in module.state_dict().items()}

    reached = 0
    states: list[State] = []

    def count(made: int) -> None:
        nonlocal reached
        reached = made + 1

    def stop() -> str | None:
        return "it is time" if run.stops_at is not None and reached >= run.stops_at else None

    def slow() -> float:
        """A clock by which a step takes so long that the ranks look after each."""
        return 1000 * comm.clock()

    def save(step: int, state: State, decision: Decision) -> None:
        assert decision.final
        states.append(deepcopy(state))

    ended = 0

    def told() -> str | None:
        nonlocal ended
        ended += 1
        return "it was told" if ended == run.ends_after else None

    average = None if run.average is None else Averaging.parse(run.average)
    ending = Ending(run.monitor, run.patience, None, run.restores_best, average, (told,))
    trainer = trainer_of(
        comm=comm,
        replica=replica,
        worker=run.strategy.worker(replica, comm, optimizer, Clip()),
        optimizer=optimizer,
        batches=Batches(training, 12, comm.rank, comm.size, run.strategy.passes, seed=7, own=own),
        loss=OBJECTIVE.loss,
        metrics=OBJECTIVE.metrics,
        epochs=run.epochs,
        seconds_per_sample=SPEEDS[comm.rank],
        validation=validation,
        validate=run.validate,
        ending=ending,
        agenda=None if run.stops_at is None else Agenda(comm, Wishes(stop=stop, now=slow)),
        on_step=count,
        save=save,
        on_epoch=lambda record: seen.append(record.epoch),
        checkpoint=lambda: written.update(state()),
    )
    history = trainer.fit(saved[comm.rank] if saved else None)
    found = evaluate(module, validation, comm, OBJECTIVE).total(comm)
    comm.barrier()
    return Ended(
        history,
        state(),
        found,
        trainer.course.ended,
        trainer.course.final,
        trainer.course.restored,
        written,
        seen,
        states,
    )


def outcome(run: Run) -> Ended:
    """What all ranks have in the end, the same."""
    found = world(run.strategy, run.ranks).run(partial(train, run=run))
    for one in found:
        assert same(one.weights, found[0].weights)
        assert [record.validation for record in one.history] == [r.validation for r in found[0].history]
        assert one.why == found[0].why
        assert one.final == one.found == found[0].found
    return found[0]


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def losses(history: list[EpochRecord]) -> list[float]:
    return [record.validation.loss for record in history if record.validation is not None]


@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_ends_early_is_the_run_of_so_many_epochs(name: str) -> None:
    run = Run(brisk(STRATEGIES[name]))
    ended = outcome(replace(run, ends_after=3))
    short = outcome(replace(run, epochs=3))
    assert ended.why is not None
    assert short.why is None
    assert len(ended.history) == 3
    # After the last epoch some workers have something to exchange yet.
    assert losses(ended.history)[:2] == losses(short.history)[:2]
    assert same(ended.written, ended.weights)
    assert ended.seen == [1, 2, 3]
    if name in ("easgd", "async_diloco"):
        return  # Its workers bring that to the centre in the order in which they come, which is another one.
    assert ended.final == short.final
    assert same(ended.weights, short.weights)


@pytest.mark.parametrize("name", NAMES)
def test_a_run_can_end_with_the_weights_of_its_best_epoch(name: str) -> None:
    run = Run(brisk(STRATEGIES[name]), lr=2.0, restores_best=True)
    ended, plain = outcome(run), outcome(replace(run, restores_best=False))
    best = min(range(6), key=lambda number: losses(plain.history)[number])
    assert losses(ended.history) == losses(plain.history)
    assert ended.restored is not None
    assert ended.restored.epoch == best + 1
    assert ended.found == ended.history[best].validation
    assert same(ended.written, ended.weights)
    assert plain.restored is None
    assert plain.final == plain.history[-1].validation


@pytest.mark.usefixtures("no_process_is_left")
@pytest.mark.parametrize(
    ("name", "validate", "stops_at", "ranks"),
    [
        ("sync", "pause", 16, 3),
        ("local", "pause", 19, 3),
        ("local", "pause", 19, 2),
        ("sync", "background", 19, 2),
    ],
)
def test_a_run_that_is_resumed_ends_where_an_uninterrupted_one_does(
    name: str, validate: str, stops_at: int, ranks: int
) -> None:
    run = Run(brisk(STRATEGIES[name]), 30, 2.0, patience=4, restores_best=True, validate=validate)
    if validate == "background":  # whose results may come after any number of epochs
        run = replace(run, patience=None, epochs=10)
    whole = outcome(run)
    assert (whole.why is None) is (run.patience is None)
    assert whole.restored is not None
    first = world(run.strategy).run(partial(train, run=replace(run, stops_at=stops_at)))
    states = [state for one in first for state in one.states]
    assert len(states) == 3
    assert len(first[0].history) < len(whole.history)
    rest = world(run.strategy, ranks).run(partial(train, run=run, saved=saved_by(states, ranks)))
    for ended in rest:
        assert ended.restored is not None
        assert ended.final is not None
        assert ended.final.loss == pytest.approx(ended.found.loss, rel=1e-6)
        if ranks == 3:
            assert (ended.why, ended.restored.epoch) == (whole.why, whole.restored.epoch)
            assert losses(ended.history) == pytest.approx(losses(whole.history), rel=1e-6)
            assert same(ended.weights, whole.weights)
        else:
            figures = losses(ended.history)
            assert ended.restored.epoch == 1 + figures.index(min(figures))
            assert ended.found.loss == pytest.approx(min(figures), rel=1e-6)


def test_copies_take_a_share_of_the_time_and_can_be_asked_for() -> None:
    now, wanted, comm = 0.0, False, HostCommunicator.alone()
    agenda = Agenda(comm, Wishes(copies=lambda: wanted, now=lambda: now))
    # The first two have to get their memory.
    copied, costs = [], iter([9.0, 9.0, 0.4, 0.2, 0.8, 0.2, 0.2])
    pause = round(10 * 0.2 / COPY_SHARE)
    for tick in range(5 * pause):
        now, wanted = tick / 10, tick == 2 * pause + 3
        if agenda.decide(tick, 0).copy:
            copied.append(tick)
            agenda.note_copy(next(costs))
    comm.close()
    later = [2 * pause + 2, 2 * pause + 3, 3 * pause + 3, 4 * pause + 3]
    assert copied == [0, 1, 2, *later]
