"""AD-PSGD follows the loop of its paper."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor, nn, optim

from tests.strategies.alone import SPEEDS, Setting, assert_close, finishes, gradient, run, start
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.strategies import ADPSGD, Clip
from tutti.strategies.measurements import Traffic
from tutti.strategies.placement import place

LR = 0.1
NBYTES = 8 * 32
"""Of the weights: two parameters, each at an aligned place."""


def neighbours(strategy: ADPSGD, rank: int, size: int) -> list[int]:
    ring = {(rank + 1) % size, (rank - 1) % size}
    return sorted((ring if strategy.graph == "ring" else set(range(size))) - {rank})


ByHand = tuple[Tensor, dict[int, Tensor], dict[int, Traffic]]


def by_hand(setting: Setting) -> ByHand:
    """Odd workers answer after a batch, and askers read the answer after another."""
    strategy, size = setting.strategy, len(setting.speeds)
    x = {rank: start() for rank in range(size)}
    random = {rank: Random(f"{strategy.seed}/{rank}") for rank in range(size)}
    asked: dict[int, list[tuple[int, Tensor]]] = {rank: [] for rank in range(1, size, 2)}
    answers: dict[int, Tensor | None] = {}
    last, counted = {}, {rank: Traffic() for rank in range(size)}

    def answer(passive: int) -> int:
        answered = len(asked[passive])
        for active, theirs in asked[passive]:
            answers[active] = (x[passive] - theirs) / 2
            x[passive] = x[passive] - answers[active]
        asked[passive].clear()
        return answered

    for rank, step in finishes(setting.steps, setting.speeds):
        own, sent, averages = gradient(x[rank], rank, step), 0, 0
        if rank % 2:
            averages = answer(rank)
            sent = averages * NBYTES
        else:
            if answers.get(rank) is not None:
                x[rank], averages = x[rank] + answers.pop(rank), 1
            if (step + 1) % strategy.every == 0:
                partner = random[rank].choice(
                    [other for other in neighbours(strategy, rank, size) if other % 2]
                )
                if rank not in answers:
                    asked[partner].append((rank, x[rank]))
                    answers[rank], sent = None, NBYTES
        if averages:
            counted[rank].add(sent, 0.0, averages)
        else:
            counted[rank].bytes_sent += sent
        last[rank] = x[rank] = x[rank] - LR * own
    for passive in asked:
        answer(passive)
    for active, due in answers.items():
        if due is not None:
            x[active] = x[active] + due
    return torch.stack(list(x.values())).mean(0), last, counted


OPTIONS = [ADPSGD(), ADPSGD(every=3), ADPSGD(graph="ring"), ADPSGD(seed=7)]
FOUR = (*SPEEDS, 0.93)


@pytest.mark.parametrize("hosts", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("strategy", OPTIONS, ids=str)
def test_the_trajectory_is_the_papers(strategy: ADPSGD, hosts: tuple[int, ...]) -> None:
    setting = Setting(strategy, speeds=FOUR)
    expected, last, _ = by_hand(setting)
    found = run(setting, VirtualWorld(4, hosts))
    for rank, outcome in enumerate(found):
        assert_close(outcome.steps[-1], last[rank])
        assert_close(outcome.final, expected)


@pytest.mark.parametrize("hosts", [(3,), (1, 2)], ids=str)
def test_a_slow_worker_delays_no_other(hosts: tuple[int, ...]) -> None:
    def program(comm: Communicator) -> float:
        module = nn.Linear(2, 1)
        replica = place(module, comm, ADPSGD.home)
        worker = ADPSGD().worker(replica, comm, optim.SGD(module.parameters(), lr=0.1), Clip())
        for _ in range(10):
            comm.compute(100.0 if comm.rank == 1 else 1.0)
            worker.step()
        done = comm.clock()
        worker.finish()
        return done

    first, slow, last = VirtualWorld(3, hosts).run(program)
    assert max(first, last) < 11
    assert slow < 1001


@pytest.mark.parametrize("hosts", [(3,), (2, 1), (2, 2), (1, 1, 1)], ids=str)
def test_evaluations_see_the_average_and_training_continues_from_own_weights(hosts: tuple[int, ...]) -> None:
    """The average moves by the mean of the gradients alone."""

    def program(comm: Communicator) -> tuple[list[float], float]:
        module = nn.Linear(1, 1, bias=False).double()
        replica = place(module, comm, ADPSGD.home)
        before = module.weight.item()
        worker = ADPSGD().worker(replica, comm, optim.SGD(module.parameters(), lr=1.0), Clip())
        evaluated = []
        for _ in range(3):
            for _ in range(4):
                ((comm.rank + 1) * module.weight).sum().backward()
                comm.compute(FOUR[comm.rank])
                worker.step()
            worker.settle()
            evaluated.append(before - module.weight.item())
            worker.resume()
        own = before - module.weight.item()
        worker.finish()
        return [*evaluated, before - module.weight.item()], own

    found = VirtualWorld(sum(hosts), hosts).run(program)
    mean = sum(range(1, sum(hosts) + 1)) / sum(hosts)
    for evaluated, _ in found:
        assert evaluated == [pytest.approx(4 * count * mean) for count in (1, 2, 3, 3)]
    assert len({own for _, own in found}) > 1


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("hosts", [(4,), (2, 2)], ids=str)
def test_exchanges_are_counted(hosts: tuple[int, ...], every: int) -> None:
    setting = Setting(ADPSGD(every=every), speeds=FOUR)
    _, _, expected = by_hand(setting)
    for rank, outcome in enumerate(run(setting, VirtualWorld(4, hosts))):
        found = outcome.traffic
        assert found.exchanges == expected[rank].exchanges
        assert found.bytes_sent == expected[rank].bytes_sent
        assert found.staleness == expected[rank].staleness
        # Nobody waits for another's batch, and each looks at its weights after every one.
        assert 0 < found.wait_s < 0.01
        assert list(found.ages_s) == [pytest.approx(FOUR[rank], abs=0.01)] * found.exchanges
    assert max(max(traffic.staleness) for traffic in expected.values() if traffic.exchanges) >= 1


def test_the_time_of_a_question_without_an_answer_is_counted() -> None:
    first, _ = run(Setting(ADPSGD(), steps=1, speeds=(1.0, 2.0)), VirtualWorld(2, (1, 1)))
    assert (first.traffic.exchanges, first.traffic.bytes_sent) == (0, NBYTES)
    assert 0 < first.traffic.wait_s < 0.01
