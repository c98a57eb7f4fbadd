"""Workers go on from their state with particular optimizers and models, and on other hosts."""

from __future__ import annotations

from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.contracts.resuming import Course, Left, begin, checkpoint, go_on
from tests.contracts.strategy import (
    check_a_run_goes_on_from_its_state_as_if_it_had_never_stopped,
    setting,
)
from tests.contracts.training import clouds, tiny
from tests.optim.odd import Odd
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.optim.optimizers.lars import LARS
from tutti.state import Saved, State, saved_by
from tutti.strategies import ADPSGD, Clip, DiLoCo, Gossip, Hogwild, Local, Solo, Strategy, Sync, Worker
from tutti.strategies.local_steps import OwnWeightsWorker
from tutti.strategies.placement import place
from tutti.strategies.sync import SyncWorker


class Lookup(nn.Module):
    """A model with a table of which a batch touches some rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.last = nn.Embedding(9, 7, sparse=True), nn.Linear(6, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        words = (4 * x[:, 0].abs()).long().clamp(max=8)
        return self.last(torch.tanh(self.first(x) + self.table(words)))


class Pair(nn.Module):
    """A model of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 7), nn.Linear(7, 3)

    def to(self, dtype: torch.dtype) -> Pair:
        self.last.double()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x)).double())


COURSES = {
    "solo, odd": Course(Solo(), optimizer=Odd),
    "sync, odd": Course(Sync(), optimizer=Odd),
    "sync ring, odd": Course(Sync(collective="ring"), optimizer=Odd),
    "local, odd": Course(Local(every=2), optimizer=Odd),
    "hogwild, odd": Course(Hogwild(), optimizer=Odd),
    "gossip, lars": Course(Gossip(), optimizer=LARS),
    "hogwild, rows": Course(Hogwild(), model=Lookup, optimizer=partial(torch.optim.Adam, lr=0.1)),
    "hogwild, sums of rows": Course(Hogwild(), model=Lookup, optimizer=partial(torch.optim.Adagrad, lr=0.1)),
    "sync, two types": Course(Sync(), model=Pair),
    "local, two types": Course(Local(every=2), model=Pair),
    "adpsgd, two types": Course(ADPSGD(), model=Pair),
}


@pytest.mark.parametrize("name", COURSES)
def test_with_particular_optimizers_and_models(name: str) -> None:
    course = COURSES[name]
    most_workers, most_hosts = course.strategy.most_workers or 3, course.strategy.most_hosts or 2
    for hosts in range(1, min(most_workers, most_hosts) + 1):
        world = partial(VirtualWorld, most_workers, -(-most_workers // hosts))
        left = world().run(begin, course)
        resumed = world().run(go_on, course, checkpoint(left))
        for before, after in zip(left, resumed, strict=True):
            assert torch.equal(after.final, before.final)


@pytest.mark.parametrize("compress", ["int8", "power_sgd"])
def test_what_compression_left_out_of_other_slices_is_not_used(compress: str) -> None:
    """The same number of ranks may be on other hosts, where each has another slice."""
    course = Course(Sync(compress=compress), dtype=torch.float64)
    left = VirtualWorld(3, [2, 1]).run(begin, course)
    for hosts in ([1, 2], [1, 1, 1], [3]):
        resumed = VirtualWorld(3, hosts).run(go_on, course, checkpoint(left))
        for after in resumed:
            assert torch.equal(after.final, resumed[0].final)
            assert float((after.final - left[0].final).abs().max()) < 0.05


@pytest.mark.parametrize(
    ("strategy", "anew"),
    [
        (Sync(), ()),
        (
            Sync(compress="int8", compress_inside=True),
            ("what compression has left out of earlier gradients",),
        ),
        (Local(), ("each worker's own weights", "the state of each worker's optimizer")),
        (Hogwild(), ("the state of each worker's optimizer",)),
    ],
)
def test_what_begins_anew_on_other_ranks_is_named(strategy: Strategy, anew: tuple[str, ...]) -> None:
    course = Course(strategy)
    left: list[Left] = VirtualWorld(2).run(begin, course)
    for after in VirtualWorld(3).run(go_on, course, checkpoint(left, 3)):
        assert after.anew == anew


@pytest.mark.parametrize("strategy", [Local, DiLoCo, Gossip, Sync])
def test_a_strategy_that_forgets_something_is_noticed(
    strategy: type[Strategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the contract that strategies of one's own are held to, too."""
    forgetful = SyncWorker if strategy is Sync else OwnWeightsWorker
    monkeypatch.setattr(forgetful, "load_state", lambda worker, saved: None)
    with pytest.raises(AssertionError, match=strategy.__name__):
        check_a_run_goes_on_from_its_state_as_if_it_had_never_stopped(strategy, setting(strategy))


def test_a_worker_without_a_state_cannot_be_made() -> None:
    class Silent(Worker):
        def step(self) -> None: ...

        def finish(self) -> None: ...

    with pytest.raises(TypeError, match=r"abstract methods '?load_state'?, '?state"):
        Silent()  # type: ignore[abstract]


def test_nobody_averages_with_who_has_not_gone_on_yet() -> None:
    """A row that is not yet what its worker had kept of it is nobody's weights."""

    def steps(comm: Communicator, saved: list[Saved] | None) -> tuple[State | None, float]:
        module = nn.Linear(1, 1, bias=False).double()
        nn.init.zeros_(module.weight)
        replica = place(module, comm, ADPSGD.home)
        worker = ADPSGD(every=2).worker(replica, comm, torch.optim.SGD(module.parameters(), lr=1.0), Clip())
        if saved is None:
            replica.flats[0].grads.fill_(-1.0 - comm.rank)
            worker.step()
            worker.settle()
            return deepcopy(worker.state()), 0.0
        comm.compute(5.0 * comm.rank)
        worker.load_state(saved[comm.rank])
        worker.step()
        return None, module.weight.item()

    kept = saved_by([state for state, _ in VirtualWorld(2).run(steps, None)])
    # They had gone to 1 and 2, and the second step begins with the mean of those.
    assert [weight for _, weight in VirtualWorld(2).run(steps, kept)] == [1.5, 1.5]


def test_a_row_stays_while_its_worker_says_what_it_knows() -> None:
    """The others may be done with that earlier, and go on."""

    def steps(comm: Communicator) -> list[Tensor]:
        module, (training, _) = tiny(), clouds()
        replica = place(module, comm, ADPSGD.home)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        worker = ADPSGD().worker(replica, comm, optimizer, Clip())
        found = []
        for step in range(6):
            if step == 3:
                worker.settle()
                for _ in range(2):
                    found.append(torch.cat([piece.values.clone() for piece in worker.state().alone.pieces]))
                    comm.compute(1.0 if comm.rank == 0 else 0.0)
                worker.resume()
            inputs, targets = training.take(torch.arange(8) + 8 * comm.rank)
            nn.functional.cross_entropy(module(inputs), targets).backward()
            comm.compute(1e-3 * (1 + comm.rank))
            worker.step()
        worker.finish()
        return found

    for first, again in VirtualWorld(2).run(steps):
        assert torch.equal(first, again)
