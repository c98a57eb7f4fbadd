"""Which batches a strategy's workers get, and which pairings are refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.run.strategies import Alone, Free
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import Part
from tutti.errors import BadOption
from tutti.run.build import deal
from tutti.run.checks import refused_strategy
from tutti.run.config import TrainConfig
from tutti.strategies import EASGD, Strategy, Sync

PART = Part(torch.randn(50, 3), torch.arange(50) % 2)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (Sync(), {}),
        (Sync(), {"balance": "speed"}),
        (Alone(), {}),
        (Free(), {}),
        (Free(), {"balance": "queue", "validate": "background"}),
        (Free(), {"validate": "background"}),
    ],
)
def test_a_fitting_pairing_is_accepted(strategy: Strategy, options: dict[str, str]) -> None:
    assert not list(refused_strategy(strategy, TrainConfig(**options)))


@pytest.mark.parametrize(
    ("strategy", "options", "message"),
    [
        (Sync(), {"balance": "queue"}, r"those of 'sync' make each update together.*leave --balance out"),
        (Sync(), {"validate": "background"}, r"do not wait \(.*leave --validate out"),
        (Alone(), {"balance": "queue"}, r"make every step at the same time, .*; leave --balance out"),
        (Alone(), {"balance": "speed"}, r"together, from one batch \(.*sync.*leave --balance out"),
        (Free(), {"balance": "speed"}, r"those of 'free' train on batches of their own.*leave --balance out"),
        (Free(), {"parallel": "sharded"}, "--parallel needs workers that make each update together"),
        (Sync(), {"servers": 1}, "cannot run on servers: only strategies derived from"),
        (EASGD(), {"device": "cuda"}, "keeps its centre in the CPU's memory, and --device is 'cuda'"),
    ],
)
def test_options_that_do_not_fit_the_strategy_are_refused(
    strategy: Strategy, options: dict[str, Any], message: str
) -> None:
    assert re.search(message, next(refused_strategy(strategy, TrainConfig(**options))))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 1, "steps": 1}, "--epochs 1 does not go with --steps 1"),
        ({"parallel": "sharded", "servers": 1}, "--servers 1: servers keep the centre of whole models"),
        ({"parallel": "sharded", "balance": "speed"}, "--parallel sharded does not go with --balance speed"),
        ({"parallel_options": {"microbatches": 2}}, "--parallel.microbatches needs --parallel: name a way"),
        ({"levels": 2}, "--levels 2 needs --servers"),
        ({"parallel": "sharded", "on_failure": "shrink"}, "use --on-failure respawn"),
        ({"parallel": "sharded", "device": "cuda"}, "--parallel sharded does not go with --device cuda"),
        (
            {"validate": "background", "strategy": "easgd", "device": "cuda"},
            "--device cuda does not go with --validate background",
        ),
        (
            {"layout": "batch_last", "precision": "bf16"},
            "--precision bf16 does not go with --layout batch_last",
        ),
        ({"layout": "batch_last", "device": "cuda"}, "--device cuda does not go with --layout batch_last"),
        ({"layout": "batch_last", "parallel": "sharded"}, "that is for ranks with whole models"),
        ({"cuda_graph": "on"}, "a graph is for samples that lie on a GPU"),
    ],
)
def test_options_that_do_not_go_together_make_no_configuration(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        TrainConfig(**options)


@pytest.mark.parametrize(
    ("strategy", "balance", "found"),
    [
        (Sync(), "none", (5, 10, False, False)),
        (Sync(), "speed", (5, 10, False, True)),
        (Alone(), "none", (3, 10, True, False)),
        (Free(), "queue", (3, 10, True, False)),
    ],
)
def test_batches_are_dealt_as_the_pace_and_the_balance_say(
    strategy: Strategy, balance: str, found: tuple[int, int, bool, bool]
) -> None:
    def work(comm: Communicator) -> tuple[int, int, bool, bool]:
        batches, speed = deal(TrainConfig(batch_size=10, balance=balance), strategy, PART, comm)
        assert sum(len(p.targets) for _, passes in batches.epoch(0) for p in passes) <= 50
        return batches.updates, batches.batch_size, batches.own, speed is not None

    assert VirtualWorld(2).run(work) == [found] * 2
