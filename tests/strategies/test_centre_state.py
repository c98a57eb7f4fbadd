"""The state of strategies with a parameter centre: what is kept is needed, and all that is needed is kept."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from torch import optim

from tests.contracts.resuming import Course, begin, checkpoint, go_on, momentum, plain
from tutti.comm.virtual.world import VirtualWorld
from tutti.strategies import EASGD, GEM, AsyncDiLoCo, Downpour, Lazy, ParamServer

# The ranks cannot import this page by its name: its functions travel by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


amsgrad = partial(optim.AdamW, lr=0.01, amsgrad=True)
LEVELLED = [
    Course(Downpour()),
    Course(Downpour(push_every=2, pull_every=3), optimizer=amsgrad),
    Course(Downpour(staleness="delay_compensated_adaptive", pull_every=2)),
    Course(Downpour(side="worker", push_every=3, pull_every=2)),
    Course(AsyncDiLoCo(every=2), optimizer=momentum),
    Course(EASGD(every=2), optimizer=plain),
    Course(GEM(least=-2.0), optimizer=momentum),
]
COURSES = [
    *LEVELLED,
    Course(Downpour(), optimizer=optim.Adafactor),
    Course(Downpour(), optimizer=momentum, late=True),
    Course(Downpour(side="worker"), optimizer=momentum, late=True),
    Course(Lazy(slack=1, threshold=50.0, memory=3), optimizer=momentum),
    Course(Lazy(slack=2)),
    Course(ParamServer()),
    Course(ParamServer(quorum=0.5), optimizer=momentum),
]


def _id(course: Course) -> str:
    return f"{course.strategy}-{_name(course.optimizer)}{'-late' * course.late}"


def _name(optimizer: Any) -> str:
    return getattr(optimizer, "func", optimizer).__name__


@pytest.fixture(autouse=True)
def _several_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is small; it is to have several slots in shared memory all the same."""
    monkeypatch.setattr("tutti.parameter_server.shared_memory.SMALLEST_SLOT", 32)


WORLDS = {
    "servers": (partial(VirtualWorld, 4, 2, servers=3), COURSES),
    "shared memory": (partial(VirtualWorld, 3), COURSES),
    "two levels": (partial(VirtualWorld, 4, 2, servers=2, levels=2, server_period=3), LEVELLED),
}


@pytest.mark.parametrize(
    ("make", "course"),
    [
        pytest.param(make, course, id=f"{name}-{_id(course)}")
        for name, (make, courses) in WORLDS.items()
        for course in courses
    ],
)
def test_a_run_resumes(make: Callable[[], VirtualWorld], course: Course) -> None:
    left = make().run(begin, course)
    for before, after in zip(left, make().run(go_on, course, checkpoint(left)), strict=True):
        assert torch.equal(after.final, before.final)


@pytest.mark.parametrize("servers", [0, 2])
def test_the_optimizer_resumes_at_another_number_of_workers(servers: int) -> None:
    """Workers that make one update together follow the uninterrupted run."""
    course = Course(ParamServer(), dtype=torch.float64)
    left = VirtualWorld(3).run(begin, course)
    resumed = VirtualWorld(2, servers=servers).run(go_on, course, checkpoint(left, 2))
    assert torch.allclose(resumed[0].final, left[0].final, rtol=1e-12, atol=1e-12)
