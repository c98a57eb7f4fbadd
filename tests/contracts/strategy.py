"""What every strategy must do. Each check is called with one, and trains with it on virtual ranks.

    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
    def test_mine(check):
        check(MyStrategy, Setting(lr=0.1))

What a `Setting` does not say is taken from the strategy's own defaults. What it says of a strategy that is
not as others are (`drifts`, `clips`) is held to it as well: nothing is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import Field, dataclass, field, fields, replace
from functools import cache, partial
from typing import Any, Final

import pytest
import torch

from tests.contracts.resuming import (
    Checkpoint,
    Course,
    Left,
    begin,
    checkpoint,
    differences,
    go_on,
    momentum,
    plain,
)
from tests.contracts.training import (
    Outcome,
    Run,
    Tied,
    adamw,
    clouds,
    digits,
    distance,
    exact,
    fading,
    frozen,
    halving,
    laid_out,
    needs_centre,
    normed,
    perceptron,
    sgd,
    tiny,
    train,
    train_alone,
)
from tutti.comm.base import Communicator, keep_servers
from tutti.comm.virtual.world import Fault, VirtualWorld
from tutti.errors import PeerLost
from tutti.replica import Replica
from tutti.strategies import STRATEGIES, Clip, Strategy
from tutti.strategies.base import Pace

Options = dict[str, Any]

RIGHT: Final = 0.95
"""Share of the test digits that every strategy must get right."""

ROUNDING: Final = 1e-4
"""How far apart, relatively, two runs of fp32 may be that add the same numbers in another order."""


@dataclass(frozen=True)
class Setting:
    """What the checks need to know about one strategy."""

    brisk: Options = field(default_factory=dict)  # options for runs of a few steps, and for the digits
    lr: float = 0.4  # of plain SGD for the digits
    epochs: int = 10  # to learn the digits
    alone: Options | None = None  # with which one worker trains as plain torch does; None: there are none
    # For hyper-parameters whose change shows only in certain company: options of the first run, and changes.
    changes: dict[str, tuple[Options, Options]] = field(default_factory=dict)
    optimizer: Callable[..., torch.optim.Optimizer] = sgd  # with which they matter
    ranks: int = 4  # on two hosts, for all hyper-parameters to matter
    drifts: bool = False  # at a learning rate of 0 the weights go on to move
    clips: bool = True  # it heeds gradient clipping


_BETWEEN_HOSTS: Final = {"compress_inside": True}

SETTINGS: Final[dict[str, Setting]] = {
    "sync": Setting(
        lr=0.8,
        alone={},
        changes={
            "collective": ({}, {"collective": "ring"}),
            "reduce": ({}, {"reduce": "adasum"}),
            "compress": ({}, {"compress": "bf16"}),
            "keep": ({"compress": "top_k", **_BETWEEN_HOSTS, "keep": 0.1}, {"keep": 0.5}),
            "rank": ({"compress": "power_sgd", **_BETWEEN_HOSTS, "rank": 1}, {"rank": 2}),
            "compress_inside": ({"compress": "bf16"}, {"compress_inside": True}),
        },
    ),
    "solo": Setting(lr=0.8, alone={}),
    "downpour": Setting(
        alone={},
        changes={
            "side": ({"push_every": 2, "pull_every": 2}, {"side": "worker"}),
            "staleness": ({}, {"staleness": "delay_compensated"}),
            "strength": ({"staleness": "delay_compensated", "strength": 0.04}, {"strength": 2.0}),
            "decay": ({"staleness": "delay_compensated_adaptive"}, {"decay": 0.5}),
        },
    ),
    "paramserver": Setting(lr=0.8, alone={}, changes={"quorum": ({}, {"quorum": 0.5})}),
    "lazy": Setting(
        lr=0.2,
        alone={"threshold": 0.0},
        changes={
            "slack": ({"slack": 0}, {"slack": 3}),
            "threshold": ({"threshold": 0.0}, {"threshold": 100.0}),
            "memory": ({"threshold": 1.0, "memory": 10}, {"memory": 2}),
        },
    ),
    "gem": Setting(
        changes={"least": ({}, {"least": -2.0}), "most": ({}, {"most": 1.0})},
    ),
    "easgd": Setting(brisk={"every": 2}, drifts=True),
    "easgd_sync": Setting(brisk={"every": 2}, drifts=True),
    "local": Setting(
        brisk={"every": 2},
        alone={},
        optimizer=adamw,
        changes={
            "first_moment_every": ({"every": 2, "second_moment_every": 4}, {"first_moment_every": 4}),
            "second_moment_every": ({"every": 2}, {"second_moment_every": 4}),
        },
    ),
    "diloco": Setting(
        brisk={"every": 2},
        alone={"outer_lr": 1.0, "outer_momentum": 0.0},
        changes={
            "fragments": ({"every": 2}, {"fragments": 2}),
            "delay": ({"every": 3, "fragments": 2}, {"delay": 2}),
            "mixing": ({"every": 3, "delay": 1}, {"mixing": 0.5}),
            "eager": ({"every": 2, "fragments": 2}, {"eager": True}),
            "compress": ({"every": 2, "fragments": 2}, {"compress": "e3m0"}),
        },
        drifts=True,
    ),
    "sparseloco": Setting(
        brisk={"every": 2, "keep": 0.3},
        alone={"keep": 1.0, "decay": 0.0, "quantize": False},
        drifts=True,
    ),
    "noloco": Setting(
        brisk={"every": 2},
        changes={"seed": ({"every": 2}, {"seed": 1})},
        drifts=True,
    ),
    "async_diloco": Setting(
        brisk={"every": 2, "dynamic": False},
        alone={"outer_lr": 1.0, "outer_momentum": 0.0},
        changes={"dynamic": ({"every": 3, "dynamic": False}, {"dynamic": True})},
        drifts=True,
    ),
    "gossip": Setting(alone={}, changes={"graph": ({"graph": "ring"}, {"graph": "all"})}),
    "adpsgd": Setting(
        alone={},
        changes={"graph": ({}, {"graph": "ring"}), "seed": ({}, {"seed": 1})},
        ranks=6,
    ),
    "hogwild": Setting(alone={}),
}
"""By name of the strategy."""


def setting(strategy: type[Strategy]) -> Setting:
    return SETTINGS.get(strategy.name, Setting())


def brisk(strategy: type[Strategy], known: Setting | None = None) -> Strategy:
    """A strategy whose workers meet often enough for a short run."""
    return strategy(**(known or setting(strategy)).brisk)


def world(strategy: Strategy, ranks: int = 3, hosts: int = 1, **options: Any) -> VirtualWorld:
    """Virtual ranks that the strategy can use, with a server where it needs one; as many as asked for, or
    the most that it can use.
    """
    most = strategy.most_workers
    ranks = ranks if most is None else min(ranks, most)
    hosts = min(hosts, ranks)
    servers = 1 if hosts > 1 and needs_centre(strategy) else 0
    strategy.check(ranks, hosts, servers)
    return VirtualWorld(ranks, -(-ranks // hosts), servers=servers, **options)


def on_several_hosts(strategy: Strategy) -> bool:
    """Whether the strategy can use several hosts, with the servers that it needs."""
    most_hosts, most_workers = strategy.most_hosts, strategy.most_workers
    return (most_hosts is None or most_hosts > 1) and (most_workers is None or most_workers > 1)


def outcomes(run: Run, on: VirtualWorld | None = None) -> list[Outcome]:
    """What all workers have in the end: the same weights, fixed values and accuracy on each."""
    found = (on or world(run.strategy)).run(train, run)
    for outcome in found:
        assert_alike(outcome, found[0])
    return found


def assert_alike(one: Outcome, other: Outcome) -> None:
    """Bit for bit the same model."""
    assert one.weights.isfinite().all()
    assert torch.equal(one.weights, other.weights)
    assert torch.equal(one.fixed, other.fixed)
    assert one.accuracy == other.accuracy


def learning(strategy: type[Strategy], known: Setting | None = None) -> Run:
    """A run that learns the digits."""
    known, together = known or setting(strategy), strategy.pace is Pace.TOGETHER
    return Run(
        brisk(strategy, known),
        model=perceptron,
        data=digits,
        optimizer=partial(sgd, lr=known.lr),
        epochs=known.epochs,
        batch_size=48 if together else 16,
        schedule=partial(fading, updates=30 * known.epochs),
    )


def check_it_learns(strategy: type[Strategy], known: Setting) -> None:
    run = learning(strategy, known)
    assert outcomes(run, _demanding_world(known, run.strategy))[0].accuracy >= RIGHT


def check_one_worker_is_sequential_where_it_should_be(strategy: type[Strategy], known: Setting) -> None:
    options = known.alone
    if options is None:
        pytest.skip(
            f"no options are known with which one worker of '{strategy.name}' is plain torch (`alone`)"
        )
    for optimizer in (partial(sgd, momentum=0.9), adamw, torch.optim.Adafactor):
        run = Run(strategy(**options), exact, optimizer=optimizer, epochs=3)
        for given in (
            run,
            replace(run, clip=Clip(norm=0.2, value=0.1)),
            replace(run, schedule=partial(halving, every=10)),
        ):
            (found,) = outcomes(given, world(run.strategy, 1))
            assert distance(found.weights, train_alone(given)) < 1e-11


def check_two_runs_are_equal_to_the_bit(strategy: type[Strategy], known: Setting) -> None:
    for hosts in (1, 2) if on_several_hosts(brisk(strategy, known)) else (1,):
        first, again = (
            outcomes(Run(brisk(strategy, known), epochs=3), world(brisk(strategy, known), 4, hosts))
            for _ in range(2)
        )
        for one, other in zip(first, again, strict=True):
            assert_alike(one, other)
            assert one.seconds == other.seconds
            assert [record.ranks for record in one.history] == [record.ranks for record in other.history]


def check_every_hyper_parameter_changes_the_outcome(strategy: type[Strategy], known: Setting) -> None:
    @cache
    def found(options: Strategy) -> list[object]:
        run = Run(options, optimizer=known.optimizer, epochs=3)
        return _bits(outcomes(run, _demanding_world(known, options)))

    for of in _hyper_parameters(strategy):
        before, changed = _change(of, known)
        first, second = found(strategy(**before)), found(strategy(**{**before, **changed}))
        assert first != second, f"{of.name} of '{strategy.name}': {before}, then {changed}"


def _demanding_world(known: Setting, strategy: Strategy) -> VirtualWorld:
    """On several hosts where that is possible: some options act between hosts alone."""
    return world(strategy, known.ranks, hosts=2 if on_several_hosts(strategy) else 1)


def _bits(found: list[Outcome]) -> list[object]:
    """Weights, and what was exchanged for them."""
    sent = [rank.bytes_sent for record in found[0].history for rank in record.ranks]
    return [found[0].weights.tolist(), sent, found[0].seconds]


def _hyper_parameters(strategy: type[Strategy]) -> list[Field[Any]]:
    """The options without those that name something outside of the run, such as the address of a centre."""
    return [of for of in fields(strategy) if of.name not in ("centre", "key")]


def _change(of: Field[Any], known: Setting) -> tuple[Options, Options]:
    """The options of a run, and what another has otherwise to show what a hyper-parameter does."""
    if of.name == "group":
        return {**known.brisk, "inside": "sync"}, {"group": 1}
    return known.changes.get(of.name) or (known.brisk, {of.name: _other_value(of, known)})


def _other_value(of: Field[Any], known: Setting) -> object:
    """Another valid value of a hyper-parameter, made up from the one that it has."""
    value = known.brisk.get(of.name, of.default)
    if of.name == "inside":
        return "sync"
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value / 2 or 0.5
    raise AssertionError(f"say in SETTINGS how '{of.name}' is changed: its default is {value!r}")


def check_steps_move_the_weights_by_the_learning_rate_alone(strategy: type[Strategy], known: Setting) -> None:
    """A schedule that goes to zero stops the training, whoever holds the optimizer."""
    run = Run(brisk(strategy, known), epochs=2)
    stop = replace(run, schedule=_stopping, epochs=1)
    longer = replace(stop, epochs=2)
    first, last = outcomes(stop)[0], outcomes(longer)[0]
    assert distance(outcomes(run)[0].weights, first.weights) > 1e-3
    if known.drifts:
        assert distance(last.weights, first.weights) > ROUNDING
    else:
        # Workers that approach each other move their average by roundings of fp32.
        assert distance(last.weights, first.weights) < ROUNDING / 100


def _stopping(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda updates: 1.0 if updates < 2 else 0.0)


def check_clipping_bounds_the_move(strategy: type[Strategy], known: Setting) -> None:
    norm, lr = 1e-3, 0.1
    run = Run(brisk(strategy, known), optimizer=partial(sgd, lr=lr), epochs=1, clip=Clip(norm=norm))
    torch.manual_seed(0)
    start = torch.cat([p.detach().double().reshape(-1) for p in tiny().parameters()])
    for clip, bound in ((Clip(norm=norm), lr * norm), (Clip(value=1e-4), lr * 1e-4 * len(start) ** 0.5)):
        found = outcomes(replace(run, clip=clip))
        steps = sum(rank.updates for record in found[0].history for rank in record.ranks)
        moved = float((found[0].weights - start).norm())
        assert moved > 0
        assert (moved <= 5.01 * steps * bound) == known.clips  # an update is scaled by 5 at most


def check_accumulation_changes_nothing_but_rounding(strategy: type[Strategy], known: Setting) -> None:
    run = Run(brisk(strategy, known), batch_size=12)
    whole, passes = outcomes(run)[0], outcomes(replace(run, passes=3))[0]
    assert distance(passes.weights, whole.weights) < ROUNDING


def check_shards_of_any_size(strategy: type[Strategy], known: Setting) -> None:
    """The last round leaves samples for one rank, for some, or for all; and there may be one round alone."""
    for samples in (33, 34, 47, 50, 2):
        ranks = 1 if brisk(strategy, known).most_workers == 1 else 3
        run = Run(brisk(strategy, known), data=partial(clouds, samples), epochs=3)
        found = outcomes(run, world(run.strategy, ranks))
        assert [record.train.samples for record in found[0].history] == [samples] * 3


def check_frozen_parameters_stay(strategy: type[Strategy], known: Setting) -> None:
    found = outcomes(Run(brisk(strategy, known), model=frozen))[0]
    torch.manual_seed(0)
    model = frozen()
    fixed = torch.cat([p.detach().double().reshape(-1) for p in model[0].parameters()])
    assert torch.equal(found.fixed, fixed)
    trained = torch.cat([p.detach().double().reshape(-1) for p in model[2].parameters()])
    assert not torch.equal(found.weights, trained)


def check_batch_norm_learns_one_set_of_statistics(strategy: type[Strategy], known: Setting) -> None:
    """Each rank gathers those of its own samples; after an epoch all go on from their mean."""
    run = Run(brisk(strategy, known), model=normed, data=partial(clouds, 96), epochs=6)
    found = outcomes(run)[0]
    assert (found.fixed[:8] > 0).any()
    assert (found.fixed[8:16] > 0).all()
    assert found.accuracy > 0.7


def check_tied_weights_stay_tied(strategy: type[Strategy], known: Setting) -> None:
    run = Run(brisk(strategy, known), model=Tied, epochs=4)
    found = outcomes(run)[0]
    assert len(found.weights) == 6 * 6 + 6 + 6 * 3 + 3
    if known.alone is not None:
        alone = replace(run, strategy=strategy(**known.alone))
        (one,) = outcomes(alone, world(alone.strategy, 1))
        assert distance(one.weights, train_alone(alone)) < ROUNDING


def check_evaluation_settles_and_training_resumes(strategy: type[Strategy], known: Setting) -> None:
    """Settled weights are everywhere the same; afterwards each worker has its own again."""

    def steps(comm: Communicator) -> list[bool]:
        module, (training, _) = tiny(), clouds()
        options = brisk(strategy, known)
        optimizer = sgd(list(module.parameters()))
        if comm.servers is not None and comm.servers.serving:
            options.serve(comm.servers, Replica(module), optimizer, Clip())
            return []
        replica, worker, _ = laid_out(module, comm, options, optimizer)
        same = []
        for step in range(6):
            inputs, targets = training.take(torch.arange(8) + 8 * comm.rank)
            torch.nn.functional.cross_entropy(module(inputs), targets).backward()
            comm.compute(1e-3 * (1 + comm.rank))
            worker.step()
            assert not replica.flats[0].grads.any()
            if step % 2:
                comm.barrier()
                worker.settle()
                worker.resume()  # exchanges that were under way have come to their end
                own = replica.flats[0].weights.clone()
                worker.settle()
                evaluated = comm.all_gather_objects(replica.flats[0].weights.clone())
                worker.resume()
                same += [all(torch.equal(other, evaluated[0]) for other in evaluated)]
                same += [torch.equal(replica.flats[0].weights, own)]
        worker.finish()
        comm.barrier()
        return same

    for found in _demanding_world(known, brisk(strategy, known)).run(steps):
        assert found
        assert all(found)


def check_a_lost_peer_is_lost_everywhere(strategy: type[Strategy], known: Setting) -> None:
    """Whichever operation a rank dies in, all others learn of it; none hangs (that would be a deadlock)."""
    one = brisk(strategy, known)
    if one.most_workers == 1:
        pytest.skip(f"'{strategy.name}' has one worker")
    run = Run(one, data=partial(clouds, 40), epochs=2)
    for ranks, hosts in [(3, 1), (4, 2)] if on_several_hosts(one) else [(3, 1)]:
        servers = world(one, ranks, hosts).servers
        for victim in [0, ranks - 1, *range(ranks, ranks + servers)]:
            for operation in _moments(victim):
                fault = Fault(victim, operation=operation)
                on = world(one, ranks, hosts, faults=[fault])
                found = [what for what in on.run(_expecting_loss, run) if what is not None]
                if not on.lost:
                    break
                # A server may die when the last worker has said goodbye.
                allowed = [{"lost"}] if victim < ranks else [{"lost"}, {"trained"}]
                assert set(found) in allowed, (fault, hosts, found)


def _moments(first: int) -> Iterator[int]:
    """A growing number of operations, ever fewer of them."""
    moment = first
    while True:
        yield moment
        moment += 1 + moment


def _expecting_loss(comm: Communicator, run: Run) -> str:
    try:
        train(comm, run)
    except PeerLost:
        return "lost"
    return "trained"


def check_a_run_goes_on_from_its_state_as_if_it_had_never_stopped(
    strategy: type[Strategy], known: Setting
) -> None:
    """To the bit, whatever the options: so all that counts is in the weights and the state."""
    for course in _courses(strategy, known):
        one = course.strategy
        usual = one == brisk(strategy, known)
        for hosts in ((1, 2) if usual else (2,)) if on_several_hosts(one) else (1,):
            left = world(one, 4, hosts).run(begin, course)
            resumed = world(one, 4, hosts).run(go_on, course, checkpoint(left))
            for before, after in zip(left, resumed, strict=True):
                if before is not None:
                    where = f"{course.strategy}, {course.optimizer}, {hosts} hosts"
                    assert torch.equal(after.final, before.final), where
                    assert not differences(before, after), where


def _courses(strategy: type[Strategy], known: Setting) -> list[Course]:
    """A strategy with its usual options, and with each of them changed."""
    given = [known.brisk]
    for of in _hyper_parameters(strategy):
        before, changed = _change(of, known)
        given += [before, {**before, **changed}]
    first, *others = dict.fromkeys(strategy(**options) for options in given)
    courses = [Course(first, optimizer=optimizer) for optimizer in (adamw, momentum, plain)]
    return courses + [Course(one, optimizer=plain if _is_particular(one) else adamw) for one in others]


def _is_particular(strategy: Strategy) -> bool:
    """Whether its options want plain SGD."""
    return bool(getattr(strategy, "threshold", 0))


def check_other_ranks_go_on_from_the_agreed_weights(strategy: type[Strategy], known: Setting) -> None:
    """More or fewer ranks do; what they cannot go on with, they name.

    Workers that make one update together, and are sequential training as one, make just the same steps.
    """
    one = brisk(strategy, known)
    if one.most_workers == 1:
        pytest.skip(f"'{strategy.name}' has one worker")
    exact = one.pace is Pace.TOGETHER and known.alone == {}
    course = Course(one, dtype=torch.float64)
    for hosts, ranks, others in ((1, 3, 2), (2, 2, 4)) if on_several_hosts(one) else ((1, 3, 2),):
        left = world(one, ranks, hosts).run(begin, course)
        resumed = world(one, others, hosts).run(go_on, course, checkpoint(left, others))
        expected = next(found for found in left if found is not None)
        for after in resumed:
            if after is None:
                continue
            for name, weights in expected.weights.items():
                assert torch.allclose(after.weights[name], weights, rtol=1e-12, atol=1e-12)
            kept = expected.state.alone
            assert bool(after.restarts) == bool(kept.pieces or kept.numbers or _remembers(expected.state.own))
            assert after.final.isfinite().all()
            if exact:
                assert distance(after.final, expected.final) < 1e-12


def _remembers(values: object) -> bool:
    """Whether there is a tensor or a text in a tree of values."""
    if isinstance(values, dict):
        return any(_remembers(value) for value in values.values())
    if isinstance(values, list | tuple):
        return any(_remembers(value) for value in values)
    return isinstance(values, torch.Tensor)


CHECKS: Final[tuple[Callable[[type[Strategy], Setting], None], ...]] = tuple(
    found for name, found in sorted(globals().items()) if name.startswith("check_")
)
"""All of them."""

NAMES: Final = tuple(STRATEGIES)


def team(comm: Communicator, strategy: Strategy) -> Communicator:
    """Return the ranks that train together by this strategy (collective).

    With a centre and several hosts the last rank is a server; with one worker each rank is by itself.
    """
    if strategy.most_workers == 1:
        return comm.split(comm.rank)
    if comm.hosts > 1 and not on_several_hosts(strategy):
        return comm.node
    return keep_servers(comm, 1) if comm.hosts > 1 and needs_centre(strategy) else comm


def _course_of_processes(name: str) -> Course:
    one = brisk(STRATEGIES[name])
    return Course(one, dtype=torch.float64, in_turn=one.pace is Pace.FREE)


_MOST_APART: Final = {
    ("paramserver", False): 1e-12,  # Gradients are added up as they come.
    ("paramserver", True): 1e-12,
    ("adpsgd", False): 0.3,  # Workers look whether a message has come already.
    ("adpsgd", True): 0.3,
}
"""How far from each other two runs by a strategy may end, on one host (False) or several, where not at 0."""


def leave_each(comm: Communicator) -> dict[str, tuple[Left, Checkpoint]]:
    """Train by every strategy; return what this rank leaves, and what a checkpoint has, where it works."""
    found = {}
    for name in NAMES:
        course = _course_of_processes(name)
        part = team(comm, course.strategy)
        left = begin(part, course)
        if left is not None:
            found[name] = left, checkpoint(part.all_gather_objects(left))
    return found


def faults_of_going_on(comm: Communicator, left: list[dict[str, tuple[Left, Checkpoint]]]) -> list[str]:
    """Go on by every strategy with what all ranks have left; return what is not as it was, on this rank.

    All is restored to the bit, and ends as the run that never stopped.
    """
    faults = []
    for name in NAMES:
        course = _course_of_processes(name)
        part = team(comm, course.strategy)
        before, kept = left[comm.rank].get(name, (None, None))
        after = go_on(part, course, kept)
        if before is None or after is None:
            continue
        found = differences(before, after)
        apart = distance(after.final, before.final)
        if not apart <= _MOST_APART.get((name, part.hosts > 1), 0.0):
            found.append(f"its end ({apart:.1e})")
        faults += [f"{name}, rank {comm.rank}: {fault}" for fault in found]
    return faults
