"""Gossip follows the loop of its paper on every graph, by rows in shared memory and by messages."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn, optim

from tests.strategies.alone import LENGTH, Setting, assert_close, gradient, run, sgd, start
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption, PeerLost
from tutti.strategies import Clip, Gossip
from tutti.strategies.averaged import MOST_ROWS
from tutti.strategies.gossip import links
from tutti.strategies.placement import place

LR = 0.1

EVERYONE = [[1 / 4] * 4] * 4
MATRICES = {
    "ring": [
        [
            [1 / 3, 1 / 3, 0, 1 / 3],
            [1 / 3, 1 / 3, 1 / 3, 0],
            [0, 1 / 3, 1 / 3, 1 / 3],
            [1 / 3, 0, 1 / 3, 1 / 3],
        ]
    ],
    "exponential": [
        [
            [1 / 3, 0, 1 / 3, 1 / 3],
            [1 / 3, 1 / 3, 0, 1 / 3],
            [1 / 3, 1 / 3, 1 / 3, 0],
            [0, 1 / 3, 1 / 3, 1 / 3],
        ]
    ],
    "all": [EVERYONE],
    "shift_one": [
        [[1 / 2, 0, 1 / 2, 0], [0, 1 / 2, 0, 1 / 2], [1 / 2, 0, 1 / 2, 0], [0, 1 / 2, 0, 1 / 2]],
        [[1 / 2, 0, 0, 1 / 2], [0, 1 / 2, 1 / 2, 0], [0, 1 / 2, 1 / 2, 0], [1 / 2, 0, 0, 1 / 2]],
    ],
}
"""W of four workers, in each step of a cycle."""


def by_hand(strategy: Gossip, steps: int, momentum: float = 0.0) -> list[Tensor]:
    """Algorithm 1 with the matrices above: after each step the weights, of shape (workers, length)."""
    x = torch.stack([start()] * 4)
    v = torch.zeros(4, LENGTH, dtype=torch.float64)
    found, mixed = [], 0
    for step in range(steps):
        g = torch.stack([gradient(x[rank], rank, step) for rank in range(4)])
        if (step + 1) % strategy.every == 0:
            cycle = MATRICES[strategy.graph]
            x = torch.tensor(cycle[mixed % len(cycle)], dtype=torch.float64) @ x
            mixed += 1
        v = momentum * v + g
        x = x - LR * v
        found.append(x)
    return found


OPTIONS = [*(Gossip(graph=graph) for graph in MATRICES), Gossip(every=3), Gossip("shift_one", every=2)]
SPEEDS = (1.0, 1.31, 0.77, 0.9)


@pytest.mark.parametrize("hosts", [(4,), (2, 2)], ids=str)
@pytest.mark.parametrize("strategy", OPTIONS, ids=str)
def test_the_trajectory_is_the_papers(strategy: Gossip, hosts: tuple[int, ...]) -> None:
    setting = Setting(strategy, sgd(LR, momentum=0.5), speeds=SPEEDS, steps=8)
    expected = by_hand(strategy, setting.steps, 0.5)
    for rank, outcome in enumerate(run(setting, VirtualWorld(4, hosts))):
        for found, wanted in zip(outcome.steps, expected, strict=True):
            assert_close(found, wanted[rank])
        assert_close(outcome.final, expected[-1].mean(0))


def test_every_option_changes_the_outcome() -> None:
    outcomes = [run(Setting(strategy, speeds=SPEEDS))[0].steps[-1] for strategy in OPTIONS]
    assert len({tuple(outcome.tolist()) for outcome in outcomes}) == len(outcomes)


@pytest.mark.parametrize("graph", MATRICES)
@pytest.mark.parametrize("workers", [2, 3])
def test_few_workers_end_with_the_same_weights_by_rows_and_by_messages(graph: str, workers: int) -> None:
    setting = Setting(Gossip(graph=graph), speeds=SPEEDS[:workers])
    by_rows = run(setting)[0].final
    by_messages = run(setting, VirtualWorld(workers, (1, workers - 1)))[0].final
    assert_close(by_messages, by_rows)


def test_one_worker_trains_sequentially() -> None:
    setting = Setting(Gossip(), sgd(LR, momentum=0.9), speeds=(1.0,), clip=Clip(norm=1.0))
    weights = nn.Parameter(start())
    plain = optim.SGD([weights], lr=LR, momentum=0.9)
    for step in range(setting.steps):
        weights.grad = gradient(weights.detach(), 0, step)
        nn.utils.clip_grad_norm_([weights], 1.0)
        plain.step()
    assert_close(run(setting)[0].final, weights.detach())


@pytest.mark.parametrize("strategy", OPTIONS[:4], ids=str)
def test_the_same_run_twice_is_bit_equal(strategy: Gossip) -> None:
    setting = Setting(strategy, sgd(LR, momentum=0.5), clip=Clip(norm=1.0))
    assert torch.equal(run(setting)[0].final, run(setting)[0].final)


@pytest.mark.parametrize("hosts", [(3,), (2, 1)], ids=str)
def test_an_evaluation_in_between_changes_nothing(hosts: tuple[int, ...]) -> None:
    setting = Setting(Gossip())
    with_one = run(replace(setting, settle_at=4), VirtualWorld(3, hosts))[0].final
    assert torch.equal(with_one, run(setting, VirtualWorld(3, hosts))[0].final)


@pytest.mark.parametrize(("hosts", "messages"), [((4,), 1), ((2, 2), 2)], ids=str)
def test_exchanges_are_counted(hosts: tuple[int, ...], messages: int) -> None:
    traffic = run(Setting(Gossip(every=3), speeds=SPEEDS), VirtualWorld(4, hosts))[0].traffic
    assert traffic.exchanges == 4
    assert traffic.bytes_sent == 4 * messages * 8 * 32  # two parameters, each at an aligned place
    assert traffic.wait_s > 0


def test_a_worker_alone_sends_nothing() -> None:
    traffic = run(Setting(Gossip(), speeds=SPEEDS[:1]))[0].traffic
    assert traffic.bytes_sent == 0


@pytest.mark.parametrize("hosts", [(8,), (4, 4)], ids=str)
def test_eight_workers_reach_one_hop_further_in_each_step(hosts: tuple[int, ...]) -> None:
    """Each begins with a number of its own at its own place, so that its weights say whose they are."""

    def program(comm: Communicator) -> list[float]:
        module, strategy = nn.Linear(8, 1, bias=False).double(), Gossip("shift_one", every=1)
        replica = place(module, comm, strategy.home)
        with torch.no_grad():
            module.weight.copy_(torch.eye(8)[comm.rank])
        worker = strategy.worker(replica, comm, optim.SGD(module.parameters(), lr=0.1), Clip())
        for _ in range(2):
            worker.skip()
        return module.weight.flatten().tolist()

    x = torch.eye(8, dtype=torch.float64)
    for step in range(2):
        sources = [[source for _, source in links("shift_one", rank, 8, step)] for rank in range(8)]
        x = torch.stack([(x[rank] + x[source]) / 2 for rank, (source,) in enumerate(sources)])
    assert VirtualWorld(8, hosts).run(program) == x.tolist()


@pytest.mark.parametrize("graph", MATRICES)
def test_many_workers_of_a_host_read_each_others_rows_too(graph: str) -> None:
    workers = MOST_ROWS + 1
    setting = Setting(Gossip(graph), speeds=[1.0] * workers, steps=3)
    outcomes, apart = run(setting), run(setting, VirtualWorld(workers, (1, workers - 1)))
    assert_close(outcomes[0].final, apart[0].final)
    assert [outcome.traffic.bytes_sent for outcome in outcomes] == [3 * 8 * 32] * workers


@pytest.mark.parametrize("hosts", [(3,), (2, 1)], ids=str)
def test_a_worker_without_samples_takes_part_in_the_average(hosts: tuple[int, ...]) -> None:
    def program(comm: Communicator) -> float:
        module = nn.Linear(1, 1, bias=False)
        replica = place(module, comm, Gossip.home)
        worker = Gossip().worker(replica, comm, optim.SGD(module.parameters(), lr=1.0), Clip())
        before = module.weight.item()
        for _ in range(2):
            if comm.rank:
                worker.skip()
            else:
                (3 * module.weight).sum().backward()
                worker.step()
        return before - module.weight.item()

    # After a step of 3 the first worker has -3, then all have -1, then it makes another step.
    found = VirtualWorld(3, hosts).run(program)
    assert found == [pytest.approx(4.0), pytest.approx(1.0), pytest.approx(1.0)]


@pytest.mark.parametrize("hosts", [(3,), (2, 1)], ids=str)
def test_a_lost_peer_is_noticed(hosts: tuple[int, ...]) -> None:
    def program(comm: Communicator) -> None:
        module = nn.Linear(2, 1)
        replica = place(module, comm, Gossip.home)
        worker = Gossip().worker(replica, comm, optim.SGD(module.parameters(), lr=0.1), Clip())
        worker.step()
        if comm.rank == 1:
            raise ArithmeticError("this worker breaks")
        worker.step()

    with pytest.raises((ArithmeticError, PeerLost)):
        VirtualWorld(3, hosts).run(program)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"graph": "star"}, "'graph' of strategy 'gossip' is 'star'; expected one of ring, exponential, all"),
        ({"every": 0}, "'every' of strategy 'gossip' is 0; expected a whole number from 1"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        Gossip(**options)
