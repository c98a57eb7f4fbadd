"""The lazy parameter server: bounded staleness, and gradients that are kept when they have hardly changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn, optim

from tests.strategies.alone import LENGTH, SPEEDS, Point, Setting, assert_close, gradient, run, sgd, start
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption
from tutti.replica import Replica
from tutti.strategies import Clip, Lazy
from tutti.strategies.placement import place

LR = 0.1
UNBOUND = 1000


def moments(
    steps: int, slack: int, speeds: Sequence[float]
) -> tuple[list[tuple[float, str, int, int]], float]:
    """When each worker pushes the gradient of a step and reads the weights for the next; the last moment.

    Ho et al.: step c + 1 begins when all workers have pushed those of step c - slack, at weights that have
    them.
    """
    pushes: dict[tuple[int, int], float] = {}
    found = []
    for step in range(steps):
        for rank, speed in enumerate(speeds):
            waited_for = [pushes[other, step - slack - 1] for other in range(len(speeds)) if step > slack]
            begins = max([pushes[rank, step - 1], *waited_for] if step else [0.0])
            found.append((begins, "read", rank, step))
            pushes[rank, step] = begins + speed
            found.append((begins + speed, "push", rank, step))
    # What is pushed at the moment of a reading is what that has waited for.
    return sorted(found, key=lambda moment: (moment[0], moment[1] == "read")), max(pushes.values())


def by_hand(
    strategy: Lazy, steps: int, speeds: Sequence[float] = SPEEDS, momentum: float = 0.0
) -> tuple[Tensor, dict[int, int]]:
    """The centre, and how many gradients each worker has kept to itself."""
    centre, velocity, eta = start(), torch.zeros(LENGTH).double(), LR / (1 - momentum)
    workers = range(len(speeds))
    weights, sent = dict.fromkeys(workers, centre), dict[int, Tensor]()
    moves: dict[int, list[float]] = {rank: [] for rank in workers}
    kept = dict.fromkeys(workers, 0)
    for _, what, rank, step in moments(steps, strategy.slack, speeds)[0]:
        if what == "read":
            if step:
                moves[rank].append(float(((centre - weights[rank]) ** 2).sum()))
            weights[rank] = centre
            continue
        g = gradient(weights[rank], rank, step)
        allowed = strategy.threshold * sum(moves[rank][-strategy.memory :]) / (eta * len(speeds)) ** 2
        if rank in sent and ((g - sent[rank]) ** 2).sum() <= allowed:
            kept[rank] += 1
        else:
            sent[rank] = g
        velocity = momentum * velocity + sent[rank]
        centre = centre - LR * velocity
    return centre, kept


OPTIONS = [
    Lazy(slack=UNBOUND, threshold=0.1),
    Lazy(slack=UNBOUND, threshold=5.0),
    Lazy(slack=UNBOUND, threshold=5.0, memory=2),
]


@pytest.mark.parametrize("strategy", OPTIONS, ids=str)
def test_the_trajectory_is_the_papers(strategy: Lazy) -> None:
    centre, kept = by_hand(strategy, 15)
    found = run(Setting(strategy, sgd(LR), steps=15))
    assert_close(found[0].final, centre)
    assert {rank: outcome.traffic.skipped for rank, outcome in enumerate(found)} == kept
    assert strategy.threshold < 1 or sum(kept.values()) > 0


@pytest.mark.parametrize("servers", [0, 1, 2])
@pytest.mark.parametrize("slack", [0, 1, 4])
def test_no_worker_is_further_ahead_than_the_bound(slack: int, servers: int) -> None:
    speeds = (1.0, 3.1, 0.77)
    seconds = moments(10, slack, speeds)[1]
    strategy = Lazy(slack=slack, threshold=0.0)
    if slack == 0:  # All begin a batch at the same moment; only the speeds decide.
        assert seconds == pytest.approx(31.0)
    found = run(Setting(strategy, sgd(LR), 10, speeds), VirtualWorld(3, servers=servers))
    assert_close(found[0].final, by_hand(strategy, 10, speeds)[0])
    assert found[0].seconds == pytest.approx(seconds, abs=0.1)
    # The fastest one waits for the slowest for all but its own work and the head start.
    assert found[2].traffic.wait_s == pytest.approx(10 * (3.1 - 0.77) - slack * 3.1, abs=3.2)


class Log(nn.Module):
    """An element for each worker and step: the weights show which updates they have."""

    def __init__(self, workers: int, steps: int) -> None:
        super().__init__()
        self.seen = nn.Parameter(torch.zeros(workers * 16, steps, dtype=torch.float64))


def read_log(comm: Communicator, slack: int, speeds: Sequence[float], without: tuple[int, int]) -> list[int]:
    """How many of the updates that the bound guarantees a worker has not seen, before each of its steps."""
    steps, missing = 8, []
    module = Log(len(speeds), steps)
    optimizer = sgd(1.0)(module)
    strategy = Lazy(slack=slack)
    if comm.servers is not None and comm.servers.serving:
        strategy.serve(comm.servers, Replica(module), optimizer, Clip())
        return []
    replica = place(module, comm, strategy.home)
    worker = strategy.worker(replica, comm, optimizer, Clip())
    for step in range(steps):
        for rank in range(comm.size):
            seen = module.seen.detach()[16 * rank]
            missing += [at for at in range(step - slack) if (rank, at) != without and not seen[at]]
        if step == steps // 2:  # as between two epochs
            worker.settle()
            worker.resume()
        comm.compute(speeds[comm.rank] * (1 + step % 3))
        if (comm.rank, step) == without:
            worker.skip()
        else:
            module.seen.grad[16 * comm.rank, step] = -1.0
            worker.step()
    worker.finish()
    written = module.seen.detach()[::16]
    assert int(written.sum()) == written.numel() - 1
    return missing


@pytest.mark.parametrize("servers", [0, 1, 2])
@pytest.mark.parametrize("slack", [0, 1, 3])
@pytest.mark.parametrize("speeds", [(1.0, 3.1, 0.77), (0.5, 0.4, 2.9)], ids=str)
def test_weights_have_all_updates_that_the_bound_guarantees(
    slack: int, servers: int, speeds: tuple[float, ...]
) -> None:
    """Ho et al. 2013: at clock c a worker sees all updates of clocks up to c - slack - 1."""
    found = VirtualWorld(3, servers=servers).run(read_log, slack, speeds, (1, 3))
    assert found == [[]] * 3


@pytest.mark.parametrize("servers", [1, 2])
def test_servers_apply_a_kept_gradient_again(servers: int) -> None:
    strategy = OPTIONS[1]
    found = run(Setting(strategy, sgd(LR), steps=15), VirtualWorld(3, (2, 1), servers=servers))
    centre, kept = by_hand(strategy, 15)
    assert_close(found[0].final, centre)
    assert {rank: outcome.traffic.skipped for rank, outcome in enumerate(found)} == kept


@pytest.mark.parametrize("servers", [0, 1])
@pytest.mark.parametrize("slack", [0, 1, UNBOUND])
def test_staleness_is_what_others_pushed_between_reading_and_pushing(slack: int, servers: int) -> None:
    speeds = (1.0, 3.1, 0.77)
    pushed, stale = dict.fromkeys(range(3), 0), {rank: Counter[int]() for rank in range(3)}
    read = dict.fromkeys(range(3), 0)
    for _, what, rank, _ in moments(10, slack, speeds)[0]:
        others = sum(pushed.values()) - pushed[rank]
        if what == "read":
            read[rank] = others
        else:
            stale[rank][others - read[rank]] += 1
            pushed[rank] += 1
    found = run(Setting(Lazy(slack=slack), sgd(LR), 10, speeds), VirtualWorld(3, servers=servers))
    assert {rank: outcome.traffic.staleness for rank, outcome in enumerate(found)} == stale


def test_a_kept_gradient_is_not_sent() -> None:
    strategies = Lazy(slack=UNBOUND, threshold=0.0), Lazy(slack=UNBOUND, threshold=5.0)
    always, lazy = [run(Setting(strategy, sgd(LR), steps=15))[0].traffic for strategy in strategies]
    assert always.bytes_sent == 15 * always.bytes_sent / always.exchanges
    assert lazy.bytes_sent == (15 - lazy.skipped) * always.bytes_sent / 15


def test_every_option_changes_the_outcome() -> None:
    strategies = [Lazy(), Lazy(slack=0), Lazy(threshold=5.0), Lazy(threshold=5.0, memory=2)]
    speeds = (1.0, 3.1, 0.77)
    finals = [run(Setting(strategy, sgd(LR), 15, speeds))[0].final for strategy in strategies]
    assert len({tuple(final.tolist()) for final in finals}) == len(finals)


def test_one_worker_that_sends_all_trains_as_plain_sgd_does() -> None:
    weights, velocity = start(), torch.zeros(LENGTH).double()
    for step in range(12):
        velocity = 0.9 * velocity + gradient(weights, 0, step)
        weights = weights - LR * velocity
    setting = Setting(Lazy(slack=0, threshold=0.0), sgd(LR, momentum=0.9), speeds=SPEEDS[:1])
    assert_close(run(setting)[0].final, weights)


@pytest.mark.parametrize("servers", [0, 1])
def test_nobody_waits_for_a_worker_that_has_finished(servers: int) -> None:
    def train(comm: Communicator) -> float:
        module, strategy = Point(), Lazy(slack=0)
        optimizer = sgd(LR)(module)
        if comm.servers and comm.servers.serving:
            strategy.serve(comm.servers, Replica(module), optimizer, Clip())
            return 0.0
        replica = place(module, comm, strategy.home)
        worker = strategy.worker(replica, comm, optimizer, Clip())
        for _ in range(2):  # an epoch, twice: the counts begin anew
            for _ in range(2 if comm.rank else 7):
                replica.flats[0].grads.fill_(1.0)
                comm.compute(1.0)
                worker.step()
            worker.settle()
            worker.resume()
        worker.finish()
        return comm.clock()

    assert VirtualWorld(3, servers=servers).run(train)[0] == pytest.approx(14.0, abs=0.1)


def test_the_same_run_twice_is_bit_equal() -> None:
    setting = Setting(Lazy(threshold=5.0), sgd(LR), clip=Clip(norm=0.5))
    assert torch.equal(run(setting)[0].final, run(setting)[0].final)


def test_an_evaluation_in_between_changes_nothing() -> None:
    setting = Setting(Lazy(threshold=5.0), sgd(LR), speeds=SPEEDS[:1])
    assert_close(run(replace(setting, settle_at=4))[0].final, run(setting)[0].final)


@pytest.mark.parametrize("gradients", [(1.0, 1.0), (100.0, -100.0, 0.001, 0.002)], ids=str)
@pytest.mark.parametrize("adopts", [False, True])
def test_nothing_is_kept_for_what_was_before_other_weights(
    adopts: bool, gradients: tuple[float, ...]
) -> None:
    """The last gradient is like the one before it, or is small beside the moves of the weights before."""

    def train(comm: Communicator) -> int:
        module, strategy = Point(), Lazy(threshold=0.5, memory=10)
        replica = place(module, comm, strategy.home)
        worker = strategy.worker(replica, comm, sgd(LR)(module), Clip())
        for number, value in enumerate(gradients):
            if adopts and number == len(gradients) // 2:
                replica.flats[0].weights.fill_(1.0)
                worker.adopt()
            replica.flats[0].grads.fill_(value)
            worker.step()
        return worker.traffic.skipped

    assert VirtualWorld(1).run(train) == [0 if adopts else 1]


@pytest.mark.parametrize("what", ["weights", "state"])
def test_whoever_waits_for_a_worker_that_loads_something_goes_on(what: str) -> None:
    def train(comm: Communicator) -> int:
        module, strategy = Point(), Lazy(slack=0)
        replica = place(module, comm, strategy.home)
        worker = strategy.worker(replica, comm, sgd(LR)(module), Clip())
        for _ in range(1 + comm.rank):
            worker.step()
        if what == "weights":
            worker.adopt()
        else:
            worker.adopt_state()
        worker.finish()
        return worker.traffic.exchanges

    assert VirtualWorld(2).run(train) == [1, 2]


def test_a_threshold_needs_sgd() -> None:
    setting = Setting(Lazy(threshold=0.1), lambda module: optim.Adam(module.parameters()))
    with pytest.raises(BadOption, match=r"use '--optimizer sgd', or '--strategy.threshold 0'"):
        run(setting)
    run(replace(setting, strategy=Lazy()))


def test_momentum_counts_as_a_larger_step() -> None:
    strategy = Lazy(slack=UNBOUND, threshold=0.5)
    centre, kept = by_hand(strategy, 15, momentum=0.5)
    found = run(Setting(strategy, sgd(LR, momentum=0.5), steps=15))
    assert_close(found[0].final, centre)
    assert {rank: outcome.traffic.skipped for rank, outcome in enumerate(found)} == kept
    assert sum(kept.values()) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slack": -1}, "'slack' .* is -1; expected a whole number from 0"),
        ({"threshold": -0.1}, "'threshold' .* expected a number from 0"),
        ({"memory": 0}, "'memory' .* expected a whole number from 1"),
    ],
)
def test_values_that_cannot_be_used_are_refused(options: dict[str, int], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        Lazy(**options)


def test_a_schedule_may_reach_a_rate_of_0() -> None:
    def stopping(module: nn.Module) -> optim.Optimizer:
        optimizer = sgd(LR)(module)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        return optimizer

    found = run(Setting(Lazy(threshold=1.0), stopping, steps=4))
    assert_close(found[0].final, start())


def test_two_levels_are_refused() -> None:
    with pytest.raises(BadOption, match="--levels 1"):
        Lazy().check(4, hosts=2, servers=1, levels=2)
