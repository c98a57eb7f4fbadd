"""Workers of several ranks train as workers of one rank with the same batches do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tutti
from tests.contracts.strategy import brisk
from tests.contracts.training import Outcome, Run, adamw, clouds, distance, sgd, tiny, train
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadOption
from tutti.strategies import STRATEGIES, Clip
from tutti.strategies.inside import GroupedStrategy

GROUPED = [
    name
    for name, kind in STRATEGIES.items()
    # Its chunks of consecutive numbers are others where the weights are cut.
    if issubclass(kind, GroupedStrategy) and name != "sparseloco"
]


class Doubles(nn.Module):
    """A tiny model that computes in float64, with a branch that has no gradient in many batches."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side = tiny().double(), nn.Linear(6, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        rare = x[:, 0] > 2
        found: Tensor = self.main(x.double())
        if rare.any():
            found = found + rare[:, None] * self.side(x.double())
        return found


class Whole(torch.optim.SGD):
    """An optimizer that may use what all parameters have together, so that it is never cut."""


def outcome(run: Run, **world: Any) -> Outcome:
    first, *others = VirtualWorld(**world).run(train, run)
    assert all(torch.equal(one.weights, first.weights) for one in others)
    return first


@pytest.mark.parametrize("name", GROUPED)
@pytest.mark.parametrize(
    ("optimizer", "ranks", "hosts", "group"),
    [(adamw, 6, 2, 0), (partial(sgd, momentum=0.9), 4, 1, 2), (partial(Whole, lr=0.1), 8, 2, 2)],
)
def test_groups_are_as_workers_of_one_rank(
    name: str, optimizer: Callable[..., torch.optim.Optimizer], ranks: int, hosts: int, group: int
) -> None:
    """More ranks than parameters, batches that leave a rank or a worker without a sample, and clipping."""
    size = group or ranks // hosts
    one = brisk(STRATEGIES[name])
    run = Run(
        one, Doubles, partial(clouds, 53), optimizer, epochs=3, batch_size=size + 3, clip=Clip(norm=0.3)
    )
    alone = outcome(run, ranks=ranks // size, ranks_per_host=max(1, ranks // hosts // size))
    inside = replace(one, inside="sync", group=group)
    grouped = outcome(replace(run, strategy=inside), ranks=ranks, ranks_per_host=ranks // hosts)
    assert distance(grouped.weights, alone.weights) < 1e-12


class Demanding(nn.Module):
    """A model with statistics and dropout, whose output is no number for one of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.drop(torch.tanh(self.norm(self.first(x)))))
        return found * torch.where(x[:, :1] > 20, torch.nan, 1.0)


def demanding(shape: object, outputs: int) -> nn.Module:
    return Demanding()


def test_groups_train_like_workers_of_one_rank() -> None:
    """BatchNorm, dropout, a loss with its own denominator, accumulation, and an update that is left out."""
    inputs, targets = clouds(150)[0].take(torch.arange(150))
    inputs[17, 0] = 1e3
    found = []
    for workers, options in ((2, {}), (4, {"inside": "sync", "group": 2})):
        done = tutti.train(
            demanding,
            (inputs, targets),
            workers=workers,
            strategy="diloco",
            strategy_options={"every": 3, **options},
            precision="fp64",
            epochs=3,
            batch_size=21,
            accumulate=2,
            lr=0.05,
            optimizer="sgd",
            class_weights="balanced",
            skip_nonfinite=3,
            validation=0.0,
            out=None,
            quiet=True,
        )
        assert sum(rank.left_out for record in done.history for rank in record.ranks) >= 3
        found.append(torch.cat([one.double().reshape(-1) for one in done.model.state_dict().values()]))
    assert distance(found[1], found[0]) < 1e-12


@pytest.mark.parametrize(
    ("options", "world", "told"),
    [
        ({"group": 2}, None, "inside=sync alone"),
        ({"inside": "sync"}, {"ranks": 3, "ranks_per_host": 2}, "a host has 1 and 2 ranks"),
        ({"inside": "sync", "group": 2}, {"ranks": 3}, "a host has 3 ranks"),
    ],
)
def test_impossible_groups_are_refused(
    options: dict[str, Any], world: dict[str, Any] | None, told: str
) -> None:
    with pytest.raises(BadOption, match=told):
        outcome(Run(STRATEGIES["local"](**options)), **(world or {"ranks": 2}))
