"""Elastic averaging, asynchronous and synchronous, follows the paper's algorithms batch by batch."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from tests.strategies.alone import LENGTH, SPEEDS, Setting, assert_close, finishes, gradient, run, sgd, start
from tutti.comm.virtual import VirtualWorld
from tutti.errors import BadOption
from tutti.strategies import EASGD, Clip, EASGDSync

LR = 0.1
WORKERS = 3


def zero() -> Tensor:
    return torch.zeros(LENGTH, dtype=torch.float64)


def asynchronous(strategy: EASGD, steps: int) -> tuple[Tensor, dict[int, Tensor]]:
    """Algorithm 2 of the paper, which is algorithm 1 when the momentum is 0: the centre, and each x."""
    centre, ranks = start(), range(WORKERS)
    x, v = {rank: start() for rank in ranks}, {rank: zero() for rank in ranks}
    alpha = strategy.force / WORKERS
    for rank, step in finishes(steps):
        # The gradient was computed before the exchange.
        g = gradient(x[rank] + strategy.momentum * v[rank], rank, step)
        if step % strategy.every == 0:
            d = alpha * (x[rank] - centre)
            x[rank], centre = x[rank] - d, centre + d
        v[rank] = strategy.momentum * v[rank] - LR * g
        x[rank] = x[rank] + v[rank]
    return centre, {rank: x[rank] + strategy.momentum * v[rank] for rank in ranks}


def synchronous(strategy: EASGDSync, steps: int) -> Tensor:
    centre, ranks = start(), range(WORKERS)
    x, v = {rank: start() for rank in ranks}, {rank: zero() for rank in ranks}
    alpha = strategy.force / WORKERS
    for step in range(steps):
        g = {rank: gradient(x[rank] + strategy.momentum * v[rank], rank, step) for rank in ranks}
        if step % strategy.every == 0:
            mean = torch.stack(list(x.values())).mean(0)
            for rank in ranks:
                x[rank] = x[rank] - alpha * (x[rank] - centre)
            centre = (1 - strategy.force) * centre + strategy.force * mean
        for rank in ranks:
            v[rank] = strategy.momentum * v[rank] - LR * g[rank]
            x[rank] = x[rank] + v[rank]
    return centre


ASYNCHRONOUS = [
    EASGD(every=1),
    EASGD(every=3),
    EASGD(every=3, force=0.5),
    EASGD(every=3, momentum=0.6),
    EASGD(every=1, force=1.5, momentum=0.9),
]


@pytest.mark.parametrize("strategy", ASYNCHRONOUS, ids=str)
def test_the_trajectory_is_the_papers(strategy: EASGD) -> None:
    centre, weights = asynchronous(strategy, 12)
    found = run(Setting(strategy, sgd(LR)))
    assert_close(found[0].final, centre)
    for rank, outcome in enumerate(found):
        assert_close(outcome.steps[-1], weights[rank])


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("strategy", ASYNCHRONOUS[:4], ids=str)
def test_servers_do_what_shared_memory_does(strategy: EASGD, servers: int) -> None:
    centre, _ = asynchronous(strategy, 12)
    world = VirtualWorld(WORKERS, (1, 2), servers=servers)
    assert_close(run(Setting(strategy, sgd(LR)), world)[0].final, centre)


SYNCHRONOUS = [EASGDSync(every=1), EASGDSync(every=3), EASGDSync(every=2, force=0.4, momentum=0.6)]


@pytest.mark.parametrize("hosts", [(3,), (1, 2)], ids=str)
@pytest.mark.parametrize("strategy", SYNCHRONOUS, ids=str)
def test_the_synchronous_trajectory_is_the_papers(strategy: EASGDSync, hosts: tuple[int, ...]) -> None:
    found = run(Setting(strategy, sgd(LR)), VirtualWorld(WORKERS, hosts))
    assert_close(found[0].final, synchronous(strategy, 12))


def test_workers_without_a_batch_take_part_in_the_synchronous_exchange() -> None:
    def train(comm: object) -> Tensor:
        from tests.strategies.alone import Point
        from tutti.strategies.placement import place

        module = Point()
        strategy = EASGDSync(every=1)
        replica = place(module, comm, strategy.home)
        worker = strategy.worker(replica, comm, sgd(LR)(module), Clip())
        for step in range(3):
            if comm.rank == 2 and step == 2:
                worker.skip()
                continue
            replica.flats[0].grads.fill_(float(comm.rank + step))
            worker.step()
        worker.finish()
        return module().detach().clone()

    found = VirtualWorld(WORKERS).run(train)
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("kind", [EASGD, EASGDSync])
def test_every_option_changes_the_outcome(kind: type[EASGD]) -> None:
    changes = ({"every": 2}, {"every": 3}, {"every": 2, "force": 0.5}, {"every": 2, "momentum": 0.5})
    finals = [run(Setting(kind(**change), sgd(LR)))[0].final for change in changes]
    assert len({tuple(final.tolist()) for final in finals}) == len(finals)


@pytest.mark.parametrize(
    "strategy", [EASGD(every=2, momentum=0.5), EASGDSync(every=2, momentum=0.5)], ids=str
)
def test_the_same_run_twice_is_bit_equal(strategy: EASGD) -> None:
    setting = Setting(strategy, sgd(LR), clip=Clip(norm=0.5))
    assert torch.equal(run(setting)[0].final, run(setting)[0].final)


@pytest.mark.parametrize(
    "strategy", [EASGD(every=2, momentum=0.5), EASGDSync(every=2, momentum=0.5)], ids=str
)
def test_an_evaluation_in_between_changes_nothing(strategy: EASGD) -> None:
    setting = Setting(strategy, sgd(LR), speeds=SPEEDS[:1])
    assert_close(run(replace(setting, settle_at=4))[0].final, run(setting)[0].final)


@pytest.mark.parametrize("kind", [EASGD, EASGDSync])
def test_any_optimizer_makes_the_workers_steps(kind: type[EASGD]) -> None:
    def adam(module: nn.Module) -> Optimizer:
        return optim.Adam(module.parameters(), lr=0.05)

    found = run(Setting(kind(every=1, force=1.0), adam, speeds=SPEEDS[:1]))
    parameter = nn.Parameter(start())
    optimizer = optim.Adam([parameter], lr=0.05)
    centre = start()
    for step in range(12):
        g = gradient(parameter.detach(), 0, step)
        with torch.no_grad():
            d = parameter - centre
            parameter -= d
            centre += d
        parameter.grad = g
        optimizer.step()
    torch.testing.assert_close(found[0].final, centre, rtol=1e-9, atol=1e-9)


def test_param_groups_and_weight_decay_work_with_momentum() -> None:
    def groups(module: nn.Module) -> Optimizer:
        first, second = module.parameters()
        return optim.SGD([{"params": [first], "lr": 0.2}, {"params": [second]}], lr=0.1, weight_decay=0.1)

    lr = torch.tensor([0.2] * 3 + [0.1] * 2, dtype=torch.float64)
    found = run(Setting(EASGD(every=100, momentum=0.5), groups, speeds=SPEEDS[:1], steps=5))
    x, v = start(), zero()
    for step in range(5):
        y = x + 0.5 * v
        v = 0.5 * v - lr * (gradient(y, 0, step) + 0.1 * y)
        x = x + v
    assert_close(found[0].steps[-1], x + 0.5 * v)


def test_exchanges_and_staleness_are_counted() -> None:
    outcomes = run(Setting(EASGD(every=4), sgd(LR)))
    assert [outcome.traffic.exchanges for outcome in outcomes] == [3, 3, 3]
    assert sum(stale * count for o in outcomes for stale, count in o.traffic.staleness.items()) > 0


@pytest.mark.parametrize("kind", [EASGD, EASGDSync])
def test_a_momentum_needs_plain_sgd(kind: type[EASGD]) -> None:
    with pytest.raises(BadOption, match="use '--optimizer sgd'"):
        run(Setting(kind(momentum=0.5), lambda module: optim.Adam(module.parameters())))
    with pytest.raises(BadOption, match=r"the optimizer SGD has momentum = 0\.9"):
        run(Setting(kind(momentum=0.5), sgd(LR, momentum=0.9)))


@pytest.mark.parametrize("kind", [EASGD, EASGDSync])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"every": 0}, "'every' .* is 0; expected a whole number from 1"),
        ({"force": 0.0}, "'force' .* is 0.0; expected a number above 0"),
        ({"momentum": 1.0}, "'momentum' .* expected a number from 0 to below 1"),
    ],
)
def test_values_that_cannot_be_used_are_refused(
    kind: type[EASGD], options: dict[str, object], message: str
) -> None:
    with pytest.raises(BadOption, match=message):
        kind(**options)


def test_springs_that_would_throw_a_worker_beyond_the_centre_are_refused() -> None:
    EASGD(force=2.0).check(workers=2)
    with pytest.raises(BadOption, match=r"'force' .* is 2\.5, which throws 2 workers beyond the centre"):
        EASGD(force=2.5).check(workers=2)
