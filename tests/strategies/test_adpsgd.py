"""AD-PSGD follows the loop of its paper, in shared memory and by messages."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest
import torch
from torch import Tensor, nn, optim

from tests.strategies.alone import SPEEDS, Setting, assert_close, finishes, gradient, run, sgd, start
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption, PeerLost
from tutti.strategies import ADPSGD, Clip
from tutti.strategies.averaged import mean
from tutti.strategies.measurements import Traffic
from tutti.strategies.placement import place

LR = 0.1
NBYTES = 8 * 32
"""Of the weights: two parameters, each at an aligned place."""


def neighbours(strategy: ADPSGD, rank: int, size: int) -> list[int]:
    ring = {(rank + 1) % size, (rank - 1) % size}
    return sorted((ring if strategy.graph == "ring" else set(range(size))) - {rank})


ByHand = tuple[Tensor, dict[int, Tensor], dict[int, Traffic]]


def by_rows(setting: Setting) -> ByHand:
    """Algorithm 1 with averages as single operations.

    Returns the mean in the end, what each worker last had, and what it exchanged.
    """
    strategy, size = setting.strategy, len(setting.speeds)
    x = {rank: start() for rank in range(size)}
    read = dict(x)
    random = {rank: Random(f"{strategy.seed}/{rank}") for rank in range(size)}
    moved, counted = dict.fromkeys(range(size), 0), {rank: Traffic() for rank in range(size)}
    for rank, step in finishes(setting.steps, setting.speeds):
        if (step + 1) % strategy.every == 0 and size > 1:
            partner = random[rank].choice(neighbours(strategy, rank, size))
            x[rank] = x[partner] = (x[rank] + x[partner]) / 2
            moved[partner] += 1
            counted[rank].add(NBYTES, 0.0, moved[rank])
        moved[rank] = 0
        x[rank] = read[rank] = x[rank] - LR * gradient(read[rank], rank, step)
    return torch.stack(list(x.values())).mean(0), read, counted


def by_messages(setting: Setting) -> ByHand:
    """The same, where odd workers answer after a batch, and askers read the answer after another."""
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


FORMS = {"rows": ((4,), by_rows), "messages": ((2, 2), by_messages)}
OPTIONS = [ADPSGD(), ADPSGD(every=3), ADPSGD(graph="ring"), ADPSGD(seed=7)]
FOUR = (*SPEEDS, 0.93)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strategy", OPTIONS, ids=str)
def test_the_trajectory_is_the_papers(strategy: ADPSGD, form: str) -> None:
    hosts, by_hand = FORMS[form]
    setting = Setting(strategy, speeds=FOUR)
    expected, last, _ = by_hand(setting)
    found = run(setting, VirtualWorld(4, hosts))
    for rank, outcome in enumerate(found):
        assert_close(outcome.steps[-1], last[rank])
        assert_close(outcome.final, expected)


@pytest.mark.parametrize("hosts", [(6,), (3, 3)], ids=str)
def test_every_option_changes_the_outcome(hosts: tuple[int, ...]) -> None:
    speeds = (*FOUR, 1.13, 0.86)
    finals = [run(Setting(s, speeds=speeds), VirtualWorld(6, hosts))[0].final for s in OPTIONS]
    assert len({tuple(final.tolist()) for final in finals}) == len(finals)


@pytest.mark.parametrize("hosts", [(3,), (1, 2), (1, 1, 1)], ids=str)
def test_the_mean_moves_by_gradients_alone(hosts: tuple[int, ...]) -> None:
    def program(comm: Communicator) -> float:
        module = nn.Linear(1, 1, bias=False).double()
        replica = place(module, comm, ADPSGD.home)
        before = module.weight.item()
        worker = ADPSGD().worker(replica, comm, optim.SGD(module.parameters(), lr=1.0), Clip())
        for _ in range(9):
            ((comm.rank + 1) * module.weight).sum().backward()
            comm.compute(SPEEDS[comm.rank])
            worker.step()
        worker.finish()
        return before - module.weight.item()

    assert VirtualWorld(3, hosts).run(program) == [pytest.approx(9 * (1 + 2 + 3) / 3)] * 3


@pytest.mark.parametrize("hosts", [(3,), (1, 2)], ids=str)
def test_a_slow_worker_holds_nobody_up(hosts: tuple[int, ...]) -> None:
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


def test_one_worker_trains_sequentially() -> None:
    setting = Setting(ADPSGD(), sgd(LR, momentum=0.9), speeds=(1.0,), clip=Clip(norm=1.0))
    weights = nn.Parameter(start())
    plain = optim.SGD([weights], lr=LR, momentum=0.9)
    for step in range(setting.steps):
        weights.grad = gradient(weights.detach(), 0, step)
        nn.utils.clip_grad_norm_([weights], 1.0)
        plain.step()
    assert_close(run(setting)[0].final, weights.detach())


@pytest.mark.parametrize("hosts", [(3,), (2, 1)], ids=str)
def test_the_same_run_twice_is_bit_equal(hosts: tuple[int, ...]) -> None:
    setting = Setting(ADPSGD(), sgd(LR, momentum=0.5), clip=Clip(norm=1.0))
    first, again = (run(setting, VirtualWorld(3, hosts))[0].final for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize("hosts", [(3,), (2, 1), (2, 2)], ids=str)
def test_evaluations_see_the_average_and_training_goes_on_from_own_weights(hosts: tuple[int, ...]) -> None:
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
        return evaluated, own

    found = VirtualWorld(sum(hosts), hosts).run(program)
    mean = sum(range(1, sum(hosts) + 1)) / sum(hosts)
    for evaluated, _ in found:
        assert evaluated == [pytest.approx(4 * count * mean) for count in (1, 2, 3)]
    assert len({own for _, own in found}) > 1


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("form", FORMS)
def test_exchanges_are_counted(form: str, every: int) -> None:
    hosts, by_hand = FORMS[form]
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


def test_who_comes_while_two_others_average_waits_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def program(comm: Communicator) -> float:
        def slow_mean(out: Tensor, vectors: Sequence[Tensor]) -> None:
            comm.compute(2.0)
            mean(out, vectors)

        if comm.rank == 0:
            monkeypatch.setattr("tutti.strategies.adpsgd.mean", slow_mean)
        module = nn.Linear(2, 1)
        replica = place(module, comm, ADPSGD.home)
        worker = ADPSGD().worker(replica, comm, optim.SGD(module.parameters(), lr=0.1), Clip())
        comm.compute(1.0 + 0.5 * comm.rank)
        if comm.rank == 0:
            worker.step()
        elif comm.rank == 1:
            worker.choose = lambda neighbours: None
            worker.step()
        comm.barrier()
        return worker.traffic.wait_s

    first, second = VirtualWorld(2).run(program)
    assert first < 0.01
    assert second == pytest.approx(1.5, abs=0.01)


@pytest.mark.parametrize("hosts", [(3,), (2, 1)], ids=str)
def test_a_lost_peer_is_noticed(hosts: tuple[int, ...]) -> None:
    def program(comm: Communicator) -> None:
        module = nn.Linear(2, 1)
        replica = place(module, comm, ADPSGD.home)
        worker = ADPSGD().worker(replica, comm, optim.SGD(module.parameters(), lr=0.1), Clip())
        worker.step()
        if comm.rank == 1:
            raise ArithmeticError("this worker breaks")
        worker.finish()

    with pytest.raises((ArithmeticError, PeerLost)):
        VirtualWorld(3, hosts).run(program)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graph": "star"}, "'graph' of strategy 'adpsgd' is 'star'; expected one of all, ring"),
        ({"every": 0}, "'every' of strategy 'adpsgd' is 0; expected a whole number from 1"),
        ({"seed": -1}, "'seed' of strategy 'adpsgd' is -1; expected a whole number from 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        ADPSGD(**options)
