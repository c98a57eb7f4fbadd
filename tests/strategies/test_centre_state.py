"""The state of strategies with a parameter centre: what is kept is needed, and all that is needed is kept."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn, optim

from tests.comm.ranks import World
from tests.contracts.resuming import (
    STOP,
    Checkpoint,
    Course,
    Left,
    begin,
    checkpoint,
    go_on,
    momentum,
    plain,
)
from tests.contracts.training import SPEEDS, clouds
from tests.trainers import trainer_of
from tutti.comm.base import Communicator, keep_servers
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import Batches
from tutti.errors import BadCheckpoint
from tutti.optim.state import load
from tutti.replica import Replica
from tutti.state import Named, Saved, State, saved_by
from tutti.strategies import EASGD, GEM, Clip, Downpour, EASGDSync, Lazy, ParamServer, Strategy
from tutti.strategies.base import Pace
from tutti.strategies.centred import Centred
from tutti.strategies.placement import place
from tutti.training.agenda import Agenda, Wishes
from tutti.training.intervals import Every
from tutti.training.losses import LOSSES

# The ranks cannot import this page by its name: its functions travel by value.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Slowing(optim.Optimizer):
    """An optimizer of somebody else's, whose steps become smaller as it counts them in its param groups."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "steps": 0, "rate": torch.ones(())})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["steps"] += 1
            group["rate"].mul_(0.9)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    rate = group["lr"] * float(group["rate"]) / group["steps"]
                    parameter.sub_(parameter.grad, alpha=rate)


amsgrad = partial(optim.AdamW, lr=0.01, amsgrad=True)
ADAPTIVE = Downpour(staleness="delay_compensated_adaptive", pull_every=2)
LEVELLED = [
    Course(Downpour()),
    Course(Downpour(push_every=2, pull_every=3, staleness="inverse"), optimizer=amsgrad),
    Course(ADAPTIVE),
    Course(Downpour(side="worker", push_every=3, pull_every=2)),
    Course(EASGD(every=2, momentum=0.5), optimizer=plain),
    Course(GEM(least=-2.0), optimizer=momentum),
]
COURSES = [
    *LEVELLED,
    Course(Downpour(), optimizer=optim.Adafactor),
    Course(Downpour(), optimizer=Slowing),
    Course(Downpour(), optimizer=momentum, late=True),
    Course(Downpour(side="worker"), optimizer=momentum, late=True),
    Course(Lazy(slack=1, threshold=50.0, memory=3), optimizer=momentum),
    Course(Lazy(slack=2)),
    Course(ParamServer()),
    Course(ParamServer(quorum=0.5), optimizer=momentum),
]
# Adafactor itself cannot step a parameter without elements. All make the same edits if all make all steps.
OWN_LOOPS = [
    replace(course, own_loop=True)
    for course in COURSES
    if course.optimizer is not optim.Adafactor and course.strategy != ParamServer(quorum=0.5)
]


def courses(given: list[Course]) -> Callable[[Callable], Callable]:
    """Run a test with each course."""
    return pytest.mark.parametrize("course", given, ids=_id)


def _id(course: Course) -> str:
    return f"{course.strategy}-{_name(course.optimizer)}{'-late' * course.late}"


def _name(optimizer: Any) -> str:
    return getattr(optimizer, "func", optimizer).__name__


@pytest.fixture(autouse=True)
def _several_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is small; it is to have several slots in shared memory all the same."""
    monkeypatch.setattr("tutti.parameter_server.shared_memory.SMALLEST_SLOT", 32)


def assert_goes_on(world: VirtualWorld, course: Course) -> None:
    left = world.run(begin, course)
    for before, after in zip(left, world.run(go_on, course, checkpoint(left)), strict=True):
        assert torch.equal(after.final, before.final)
        assert after.staleness == before.staleness


@courses(COURSES)
def test_goes_on_with_servers(course: Course) -> None:
    assert_goes_on(VirtualWorld(4, 2, servers=3), course)


@courses([*COURSES, *OWN_LOOPS])
def test_goes_on_in_shared_memory(course: Course) -> None:
    assert_goes_on(VirtualWorld(3), course)
    if course.own_loop:
        assert_goes_on(VirtualWorld(1), course)  # Its optimizer keeps its state itself.


@courses(LEVELLED)
def test_goes_on_with_two_levels(course: Course) -> None:
    assert_goes_on(VirtualWorld(4, 2, servers=2, levels=2, server_period=3), course)


@courses(LEVELLED)
def test_taking_the_state_does_not_change_the_course_with_two_levels(course: Course) -> None:
    course = replace(course, in_turn=True)
    looked, whole = (
        VirtualWorld(4, 2, servers=2, levels=2, server_period=3).run(begin, one)
        for one in (course, replace(course, stops=False))
    )
    for found, expected in zip(looked, whole, strict=True):
        assert torch.equal(found.final, expected.final)


@courses([COURSES[2], COURSES[4], COURSES[10], COURSES[12]])
def test_other_forms_of_centre_go_on_with_weights_and_optimizer(course: Course) -> None:
    """With the same workers, and with others; on servers, and in shared memory."""
    shared, served = VirtualWorld(4), VirtualWorld(4, 2, servers=3)
    worlds = [shared, served, VirtualWorld(2), VirtualWorld(5, 3, servers=1)]
    if course in LEVELLED:
        worlds += [VirtualWorld(4, (1, 3), servers=1, levels=2), VirtualWorld(4, 2, servers=2, levels=2)]
    for first in worlds:
        left = first.run(begin, course)
        at = worlds.index(first)
        for second in [*worlds[at + 1 :], *worlds[:at]][:2]:
            resumed = second.run(go_on, course, checkpoint(left, second.ranks))
            for after in resumed:
                assert after.final.isfinite().all()
                for name, weights in left[0].weights.items():
                    assert torch.allclose(after.weights[name], weights, rtol=1e-6, atol=1e-6), (first, second)


@pytest.mark.parametrize("servers", [0, 2])
def test_the_optimizer_goes_on_at_another_number_of_workers(servers: int) -> None:
    """Workers that make one update together follow the uninterrupted run."""
    course = Course(ParamServer(), dtype=torch.float64)
    left = VirtualWorld(3).run(begin, course)
    resumed = VirtualWorld(2, servers=servers).run(go_on, course, checkpoint(left, 2))
    assert torch.allclose(resumed[0].final, left[0].final, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("strategy", [Downpour(), ADAPTIVE, Lazy(), ParamServer()], ids=str)
@pytest.mark.parametrize("make", [momentum, amsgrad, optim.Adafactor], ids=_name)
def test_an_optimizer_that_has_a_state_brings_it(strategy: Strategy, make: Any) -> None:
    """As when another strategy goes on; wherever the centre's optimizer runs."""
    ends = [
        VirtualWorld(1, servers=servers).run(stepped, strategy, make, warm)[0]
        for warm in (True, False)
        for servers in (0, 2)
    ]
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[2], ends[3])
    assert not torch.equal(ends[0], ends[2])


def stepped(comm: Communicator, strategy: Centred, make: Any, warm: bool) -> Tensor | None:
    """The weights after a step by an optimizer that made some before, of which its state alone is kept."""
    torch.manual_seed(0)
    module = nn.Linear(20, 3)
    before = deepcopy(module.state_dict())
    optimizer = make(list(module.parameters()))
    serves = comm.servers is not None and comm.servers.serving
    for _ in range(3 if warm and not serves else 0):
        module(torch.randn(4, 20)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    module.load_state_dict(before)
    if serves:
        strategy.serve(comm.servers, Replica(module), optimizer, Clip())
        return None
    replica = place(module, comm, strategy.home)
    worker = strategy.worker(replica, comm, optimizer, Clip())
    module(torch.ones(4, 20)).square().sum().backward()
    worker.step()
    worker.finish()
    return replica.flats[0].weights.clone()


WORLDS = {
    "shared": {},
    "served": {"ranks_per_host": (2, 1), "servers": 2},
    "levels": {"ranks_per_host": (2, 1), "servers": 1, "levels": 2, "server_period": 3},
}


OTHERS = [course for course in COURSES if course not in LEVELLED and course.optimizer is not optim.Adafactor]


@pytest.mark.parametrize(
    ("course", "form"),
    [
        *((course, form) for course in LEVELLED for form in ("shared", "levels")),
        *((course, ("shared", "served")[number % 2]) for number, course in enumerate(OTHERS)),
    ],
    ids=lambda one: one if isinstance(one, str) else _id(one),
)
def test_a_trainer_goes_on_in_the_middle_of_an_epoch(course: Course, form: str) -> None:
    """With workers that are in different places of it."""
    world = VirtualWorld(3, **WORLDS[form])
    whole = world.run(fitted, course, None)
    assert [len(one.states) for one in whole] == [3] * 3
    for number in (0, 2):
        kept = [one.states[number] for one in whole]
        for before, after in zip(whole, world.run(fitted, course, saved_by(kept)), strict=True):
            assert torch.equal(after.weights, before.weights)


@dataclass
class Fitted:
    """What a trainer has left: final weights, and the states that it has saved before."""

    states: list[State]
    weights: Tensor


def fitted(comm: Communicator, course: Course, saved: list[Saved] | None) -> Fitted | None:
    torch.manual_seed(0)
    module, strategy = course.model(), course.strategy
    optimizer = course.optimizer(list(module.parameters()))
    if comm.servers is not None and comm.servers.serving:
        strategy.serve(comm.servers, Replica(module), optimizer, Clip())
        return None
    (part, _), free = clouds(90), strategy.pace is Pace.FREE
    batches = Batches(part, 6, comm.rank, comm.size, seed=7, own=free)
    states: list[State] = []
    if saved is not None:
        module.load_state_dict(
            {name: saved[0].joint.tensors[f"weights/{name}"] for name in module.state_dict()}
        )
        options = saved[0].shared["training"]["schedule"]["options"]
        load(optimizer, {p: name for name, p in module.named_parameters()}, saved[comm.rank], options)
    replica = place(module, comm, strategy.home)
    trainer = trainer_of(
        comm=comm,
        replica=replica,
        worker=strategy.worker(replica, comm, optimizer, Clip()),
        optimizer=optimizer,
        batches=batches,
        loss=LOSSES["cross_entropy"],
        metrics=(),
        epochs=5 if free else 2,
        seconds_per_sample=SPEEDS[comm.rank],
        agenda=Agenda(comm, Wishes(Every(steps=8), free=free, now=comm.clock)),
        save=lambda step, state, decision: None if decision.final else states.append(deepcopy(state)),
    )
    trainer.fit(None if saved is None else saved[comm.rank])
    comm.barrier()
    return Fitted(states, replica.flats[0].weights.clone())


# Each strategy with options such that each value that is kept shows in the weights of one course or another.
TELLING: dict[str, list[Course]] = {
    "downpour": [
        Course(Downpour(push_every=2, pull_every=3, staleness="inverse"), optimizer=momentum),
        Course(ADAPTIVE),
        Course(Downpour(), optimizer=Slowing),
    ],
    "downpour, worker": [
        Course(Downpour(side="worker", push_every=3, pull_every=2, staleness="inverse")),
        Course(Downpour(side="worker", push_every=3, pull_every=1), steps=STOP),
    ],
    "easgd": [Course(EASGD(every=3, momentum=0.5), optimizer=plain), Course(EASGD(every=2))],
    "easgd_sync": [Course(EASGDSync(every=3, momentum=0.5), optimizer=plain), Course(EASGDSync(every=2))],
    "gem": [Course(GEM(), optimizer=momentum, own_loop=True)],
    "lazy": [
        Course(Lazy(slack=1, threshold=threshold, memory=3), optimizer=momentum)
        for threshold in (0.0, 10.0, 100.0, 1000.0)
    ],
    "paramserver": [Course(ParamServer())],
}


@pytest.mark.parametrize("name", TELLING)
def test_nothing_is_kept_that_makes_no_difference(name: str) -> None:
    worlds = [VirtualWorld(3)]
    if not any(course.own_loop for course in TELLING[name]) and name != "easgd_sync":
        worlds.append(VirtualWorld(4, 2, servers=2))
    for world in worlds:
        kept, tells = set(), set()
        for course in TELLING[name]:
            left = world.run(begin, course)
            for entry, changed in mutants(checkpoint(left)):
                kept.add(entry)
                if entry not in tells and is_different(world, course, changed, left):
                    tells.add(entry)
        assert kept
        assert tells == kept


def test_nothing_is_kept_of_two_levels_that_makes_no_difference() -> None:
    world, kept, tells = VirtualWorld(4, 2, servers=2, levels=2, server_period=4), set(), set()
    for strategy in (Downpour(push_every=2, staleness="inverse"), ADAPTIVE):
        left = world.run(begin, Course(strategy))
        for entry, changed in mutants(checkpoint(left)):
            kept.add(entry)
            if is_different(world, Course(strategy), changed, left):
                tells.add(entry)
    assert tells == kept


def is_different(world: VirtualWorld, course: Course, kept: Checkpoint, left: list[Left | None]) -> bool:
    try:
        resumed = world.run(go_on, course, kept)
    except BadCheckpoint:
        return True
    pairs = zip(resumed, left, strict=True)
    return any(not torch.equal(a.final, b.final) or a.staleness != b.staleness for a, b in pairs)


def mutants(kept: Checkpoint) -> Iterator[tuple[str, Checkpoint]]:
    """Checkpoints that are wrong in one kind of values, on all ranks; with the name of that kind."""
    for part in ("joint", "alone"):
        named = [getattr(saved, part) for saved in kept.saved]
        names = {name for one in named for name in one.tensors}
        names |= {name for one in named for name, number in one.numbers.items() if number is not None}
        for kind in sorted({_kind(name) for name in names}):
            wrong = [
                replace(saved, **{part: _with_others(one, kind)})
                for saved, one in zip(kept.saved, named, strict=True)
            ]
            yield f"{part}/{kind}", replace(kept, saved=wrong)
    for area in ("own", "shared"):
        for path in sorted({path for saved in kept.saved for path in _paths(getattr(saved, area))}):
            yield (
                "/".join((area, *path)),
                replace(kept, saved=[_with_other(one, area, path) for one in kept.saved]),
            )


def _kind(name: str) -> str:
    """The part of a tensor's name that says nothing of the parameter."""
    prefix, _, rest = name.partition("/")
    return f"{prefix}/{rest.rpartition('/')[2]}" if prefix.startswith("optimizer") else prefix


def _with_others(held: Named, kind: str) -> Named:
    tensors = {name: one + 0.5 if _kind(name) == kind else one for name, one in held.tensors.items()}
    numbers = {name: one + 1 if _kind(name) == kind and one else one for name, one in held.numbers.items()}
    return Named(tensors, numbers)


def _paths(values: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from ((name, *path) for path in _paths(value))
        else:
            yield (name,)


def _with_other(saved: Saved, area: str, path: tuple[str, ...]) -> Saved:
    changed = deepcopy(getattr(saved, area))
    *way, last = path
    values = changed
    for name in way:
        values = values[name]
    values[last] = _other(values[last])
    return replace(saved, **{area: changed})


def _other(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if value and isinstance(value[0], int):
        return [one + 3 for one in value]
    return [0.0] * len(value) if value and isinstance(value[0], float) else ["last.bias"]


@pytest.fixture(scope="module")
def processes() -> Iterator[World]:
    with World(2) as world:
        yield world


def alone_with_a_server(comm: Communicator, function: Callable, *arguments: object) -> object:
    return function(keep_servers(comm, (1,)), *arguments)


@courses([*COURSES, Course(EASGDSync(every=3, momentum=0.5), optimizer=plain)])
def test_processes_go_on(course: Course, processes: World) -> None:
    """One worker and a server, whose order is known; and two workers, where their order does not matter."""
    is_ordered = isinstance(course.strategy, EASGDSync) or course.strategy == ParamServer()
    if not isinstance(course.strategy, EASGDSync):
        left, _ = processes.run(alone_with_a_server, begin, course)
        resumed, _ = processes.run(alone_with_a_server, go_on, course, checkpoint([left]))
        assert torch.equal(resumed.final, left.final)
    left = processes.run(begin, course)
    for before, after in zip(left, processes.run(go_on, course, checkpoint(left)), strict=True):
        assert after.final.isfinite().all()
        assert not is_ordered or torch.equal(after.final, before.final)
