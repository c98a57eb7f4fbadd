"""Workers go on from their state with particular optimizers and models, and on other hosts."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.contracts.resuming import Course, Left, begin, checkpoint, go_on
from tests.contracts.strategy import check_a_run_goes_on_from_its_state_as_if_it_had_never_stopped, setting
from tests.optim.odd import Odd
from tutti.comm.virtual.world import VirtualWorld
from tutti.optim.optimizers.lars import LARS
from tutti.strategies import ADPSGD, DiLoCo, Gossip, Hogwild, Local, Solo, Strategy, Sync
from tutti.strategies.own_weights import OwnWeightsWorker
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


@pytest.mark.parametrize(
    ("strategy", "parts"),
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
def test_state_that_restarts_on_other_ranks_is_named(strategy: Strategy, parts: tuple[str, ...]) -> None:
    course = Course(strategy)
    left: list[Left] = VirtualWorld(2).run(begin, course)
    for after in VirtualWorld(3).run(go_on, course, checkpoint(left, 3)):
        assert after.restarts == parts


@pytest.mark.parametrize("strategy", [Local, DiLoCo, Gossip, Sync])
def test_a_strategy_that_forgets_something_is_noticed(
    strategy: type[Strategy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the contract that strategies of one's own are held to, too."""
    forgetful = SyncWorker if strategy is Sync else OwnWeightsWorker
    monkeypatch.setattr(forgetful, "load_state", lambda worker, saved: None)
    with pytest.raises(AssertionError, match=strategy.__name__):
        check_a_run_goes_on_from_its_state_as_if_it_had_never_stopped(strategy, setting(strategy))
