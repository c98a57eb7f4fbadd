"""An optimizer's state by parameter: left by some ranks, taken up by another number of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn, optim
from torch.optim import Optimizer

from tutti.errors import BadCheckpoint
from tutti.optim.sharded import ShardedOptimizer, own_slices
from tutti.optim.state import load, options_of
from tutti.replica import Replica
from tutti.state import Named, Saved, State, named, saved_by

OPTIMIZERS: list[tuple[type[Optimizer], dict[str, object]]] = [
    (optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (optim.Adam, {"amsgrad": True}),
    (optim.AdamW, {"foreach": True}),
    (optim.NAdam, {}),
    (optim.ASGD, {}),
    (optim.Rprop, {}),
    (optim.Adafactor, {}),
]


def convolutions() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 5, 3), nn.Linear(4, 3)).double()
    return layers.to(memory_format=torch.channels_last)


def laid_out(
    module: nn.Module, make: Callable[[Iterable[nn.Parameter]], Optimizer], ranks: int, saved: Saved | None
) -> tuple[Replica, list[ShardedOptimizer]]:
    optimizer = make(module.parameters())
    if saved is not None:
        load(optimizer, {p: name for name, p in module.named_parameters()}, saved, options_of(optimizer))
    replica = Replica(module)
    cut = [own_slices(flat, ranks, optimizer) for flat in replica.flats]
    return replica, [ShardedOptimizer(optimizer, replica, [s[rank] for s in cut]) for rank in range(ranks)]


def train(replica: Replica, shards: list[ShardedOptimizer], steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for flat in replica.flats:
            for parameter in flat.parameters:
                parameter.grad.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        for shard in shards:
            shard.step()


@pytest.mark.parametrize(("cls", "options"), OPTIMIZERS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("order", [torch.channels_last, torch.contiguous_format])
def test_other_ranks_go_on_bit_equal(
    cls: type[Optimizer], options: dict[str, object], ranks: int, order: torch.memory_format
) -> None:
    def make(parameters: Iterable[nn.Parameter]) -> Optimizer:
        return cls(parameters, **options)

    replica, shards = laid_out(convolutions(), make, 2, None)
    train(replica, shards, range(4))
    (saved, *_) = saved_by([State(shard.state()) for shard in shards], ranks)
    weights = copy.deepcopy(replica.module.state_dict())
    train(replica, shards, range(4, 7))
    # What is kept belongs to parameters, not to places in memory.
    module = convolutions().to(memory_format=order)
    module.load_state_dict(weights)
    resumed, others = laid_out(module, make, ranks, saved)
    train(resumed, others, range(4, 7))
    for parameter, same in zip(replica.module.parameters(), module.parameters(), strict=True):
        # Adafactor adds up over a whole parameter, in the order of memory.
        rounding = 1e-12 if cls is optim.Adafactor else 0.0
        torch.testing.assert_close(same, parameter, rtol=rounding, atol=0.0, check_stride=False)


def test_a_missing_rank_is_noticed() -> None:
    replica, shards = laid_out(convolutions(), optim.Adam, 2, None)
    train(replica, shards, range(1))
    with pytest.raises(BadCheckpoint, match="is not whole: elements from number"):
        named([shards[0].state()])


def test_an_optimizer_with_other_param_groups_is_refused() -> None:
    module = convolutions()
    with pytest.raises(BadCheckpoint, match="the optimizer has 1 param groups, and 2 in the checkpoint"):
        load(optim.Adam(module.parameters()), {}, Saved(Named({}, {}), None, {}, None), [{}, {}])
