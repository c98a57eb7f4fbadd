"""Gossip follows the loop of its paper on every graph, by rows in shared memory and by messages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.strategies.alone import LENGTH, Setting, assert_close, gradient, run, sgd, start
from tutti.comm.virtual.world import VirtualWorld
from tutti.strategies import Gossip

LR = 0.1

CYCLES = {
    "ring": ["013 012 123 023"],
    "exponential": ["023 013 012 123"],
    "all": ["0123 0123 0123 0123"],
    "shift_one": ["02 13 02 13", "03 12 12 03"],
}
"""With whom each of four workers averages, in each step of a cycle."""


def matrix(words: str) -> Tensor:
    """W: row i holds the weights with which worker i averages."""
    rows = [[str(rank) in word and 1 / len(word) for rank in range(4)] for word in words.split()]
    return torch.tensor(rows, dtype=torch.float64)


def by_hand(strategy: Gossip, steps: int, momentum: float = 0.0) -> list[Tensor]:
    """Algorithm 1: after each step the weights, of shape (workers, length)."""
    x = torch.stack([start()] * 4)
    v = torch.zeros(4, LENGTH, dtype=torch.float64)
    found, mixed = [], 0
    for step in range(steps):
        g = torch.stack([gradient(x[rank], rank, step) for rank in range(4)])
        if (step + 1) % strategy.every == 0:
            cycle = CYCLES[strategy.graph]
            x = matrix(cycle[mixed % len(cycle)]) @ x
            mixed += 1
        v = momentum * v + g
        x = x - LR * v
        found.append(x)
    return found


OPTIONS = [*(Gossip(graph=graph) for graph in CYCLES), Gossip(every=3), Gossip("shift_one", every=2)]
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


@pytest.mark.parametrize("graph", CYCLES)
@pytest.mark.parametrize("workers", [2, 3])
def test_few_workers_end_with_the_same_weights_by_rows_and_by_messages(graph: str, workers: int) -> None:
    setting = Setting(Gossip(graph=graph), speeds=SPEEDS[:workers])
    by_rows = run(setting)[0].final
    by_messages = run(setting, VirtualWorld(workers, (1, workers - 1)))[0].final
    assert_close(by_messages, by_rows)


@pytest.mark.parametrize(("hosts", "messages"), [((4,), 1), ((2, 2), 2)], ids=str)
def test_exchanges_are_counted(hosts: tuple[int, ...], messages: int) -> None:
    traffic = run(Setting(Gossip(every=3), speeds=SPEEDS), VirtualWorld(4, hosts))[0].traffic
    assert traffic.exchanges == 4
    assert traffic.bytes_sent == 4 * messages * 8 * 32  # two parameters, each at an aligned place
    assert traffic.wait_s > 0
