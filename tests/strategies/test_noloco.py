"""NoLoCo follows the loop of its paper, batch by batch."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn, optim

from tests.contracts.training import Run, train
from tests.strategies.alone import LENGTH, Setting, assert_close, gradient, run, start
from tests.strategies.test_diloco import adamw
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption
from tutti.strategies import DiLoCo, NoLoCo
from tutti.strategies.noloco import partner_of

SPEEDS = (1.0, 1.31, 0.77, 0.9, 1.17)


def by_hand(strategy: NoLoCo, steps: int, workers: int) -> Tensor:
    """The paper's equations with means over groups, and each worker's optimizer: the weights in the end."""
    y = [start() for _ in range(workers)]
    v = [torch.zeros(LENGTH, dtype=torch.float64) for _ in range(workers)]
    x = [nn.Parameter(start()) for _ in range(workers)]
    optimizers = [optim.AdamW([weights], lr=0.05, weight_decay=0.1) for weights in x]
    for done in range(1, steps + 1):
        for rank, (weights, optimizer) in enumerate(zip(x, optimizers, strict=True)):
            weights.grad = gradient(weights.detach(), rank, done - 1)
            optimizer.step()
        if done % strategy.every:
            continue
        d = [one - weights.detach() for one, weights in zip(y, x, strict=True)]
        before = list(y)
        for rank in range(workers):
            partner = partner_of(rank, workers, done // strategy.every, strategy.seed)
            group = [rank] if partner is None else [rank, partner]
            outer = sum(d[one] for one in group) / len(group)
            apart = before[rank] - sum(before[one] for one in group) / len(group)
            v[rank] = strategy.outer_momentum * v[rank] + strategy.outer_lr * outer + strategy.pull * apart
            y[rank] = before[rank] - v[rank]
            x[rank].data.copy_(y[rank])
    return torch.stack([weights.detach() for weights in x])


OPTIONS = [
    NoLoCo(every=1),
    NoLoCo(every=3),
    NoLoCo(every=5, seed=3),
    NoLoCo(every=2, outer_lr=0.5, outer_momentum=0.25, pull=0.375),
]


@pytest.mark.parametrize("hosts", [(4,), (2, 2), (3, 2)], ids=str)
@pytest.mark.parametrize("strategy", OPTIONS, ids=str)
def test_the_trajectory_is_the_papers(strategy: NoLoCo, hosts: tuple[int, ...]) -> None:
    workers = sum(hosts)
    setting = Setting(strategy, adamw, steps=12, speeds=SPEEDS[:workers])
    expected = by_hand(strategy, setting.steps, workers)
    found = run(setting, VirtualWorld(workers, hosts))
    for outcome, weights in zip(found, expected, strict=True):
        assert_close(outcome.steps[-1], weights)
        assert_close(outcome.final, expected.mean(0))


def test_pairs_are_mutual_and_every_two_workers_meet() -> None:
    for size in (1, 2, 5, 6):
        met: Counter[tuple[int, int | None]] = Counter()
        for turn in range(400):
            pairs = {rank: partner_of(rank, size, turn, seed=0) for rank in range(size)}
            alone = [rank for rank, partner in pairs.items() if partner is None]
            assert len(alone) == size % 2
            assert all(partner is None or pairs[partner] == rank for rank, partner in pairs.items())
            met.update(pairs.items())
        assert len(met) == size * (size if size % 2 else size - 1)
        assert max(met.values()) <= 2 * min(met.values())


def test_two_workers_are_diloco_on_average() -> None:
    """The pull cancels out in the mean of a pair; without momentum both outer steps are alike."""
    noloco = NoLoCo(every=4, outer_lr=0.6, outer_momentum=0.0)
    diloco = DiLoCo(every=4, outer_lr=0.6, outer_momentum=0.0)
    found, expected = (run(Setting(one, speeds=(1.0, 1.31)))[0].final for one in (noloco, diloco))
    assert_close(found, expected)


def test_exchanges_are_counted() -> None:
    setting = Setting(NoLoCo(every=5), adamw, steps=10, speeds=SPEEDS)
    found = [outcome.traffic for outcome in run(setting)]
    assert [one.exchanges for one in found] == [2] * 5
    # Two of five stand out in turn. A message has an outer gradient and weights: two parameters, aligned.
    assert sorted(one.bytes_sent for one in found) == [512] * 2 + [1024] * 3


def test_ranks_that_are_one_worker_together_are_refused() -> None:
    with pytest.raises(BadOption, match="needs 2 workers, not 1"):
        VirtualWorld(2).run(train, Run(NoLoCo(inside="sync")))
