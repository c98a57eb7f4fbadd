"""Replays compared with runs of the strategies on virtual ranks, with the same times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tutti.comm.base import Communicator
from tutti.comm.network import Network
from tutti.comm.topology import FatTree, Sites
from tutti.comm.virtual.world import VirtualWorld
from tutti.optim import build
from tutti.replica import Replica
from tutti.strategies import Clip, Strategy, named, place
from tutti.strategies.base import Pace
from tutti.strategies.centred import Centred
from tutti.studies.simulate.failures import Failures, goodput
from tutti.studies.simulate.pattern import CommPattern
from tutti.studies.simulate.step_times import StepTimes
from tutti.studies.simulate.timing import Replayed, replay

LAYERS = 16
PARAMETERS = LAYERS * 64 * 64
TIMES = StepTimes((0.9e-3, 1e-3, 1.1e-3, 1.5e-3))
SLOW = Network(200e-6, 500e6, 1e-6, 8e9)
"""A message of the model takes half of a step."""


def run(
    strategy: Strategy, hosts: Sequence[int], network: Network, steps: int, servers: int, seed: int
) -> tuple[numpy.ndarray, float]:
    """Train a model; return when each worker ends, and the mean staleness."""
    draws = TIMES.sample(numpy.random.default_rng(seed), (steps, strategy.passes, sum(hosts)))

    def program(comm: Communicator) -> tuple[float, float] | None:
        module = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(LAYERS)))
        optimizer = build("sgd", [*module.parameters()], 1e-3)
        if comm.servers is not None and comm.servers.serving:
            assert isinstance(strategy, Centred)
            strategy.serve(comm.servers, Replica(module), optimizer, Clip())
            return None
        worker = strategy.worker(place(module, comm, strategy.home), comm, optimizer, Clip())
        worker.share = 1 / comm.size if strategy.pace is Pace.TOGETHER else 1.0
        comm.barrier()
        began = comm.clock()
        for drawn in draws[:, :, comm.rank]:
            comm.compute(float(drawn.sum()))
            (module(torch.randn(1, 64)).sum() * worker.share).backward()
            worker.step()
        ended = comm.clock()
        stale = worker.traffic.staleness
        worker.finish()
        return ended - began, sum(k * v for k, v in stale.items()) / max(1, sum(stale.values()))

    world = VirtualWorld(sum(hosts), list(hosts), network, servers=servers)
    found = [one for one in world.run(program) if one is not None]
    return numpy.array([one[0] for one in found]), float(numpy.mean([one[1] for one in found]))


CASES: list[tuple[str, dict[str, Any], list[int], int]] = [
    ("sync", {}, [1] * 8, 0),
    ("sync", {"every": 2}, [2, 2, 2], 0),
    ("sync", {"compress": "bf16"}, [3, 1], 0),
    ("local", {"every": 4, "after": 3}, [2] * 4, 0),
    ("diloco", {"every": 6, "fragments": 2, "delay": 1}, [1] * 5, 0),
    ("sparseloco", {"every": 5}, [2] * 3, 0),
    ("easgd_sync", {"every": 3}, [1] * 4, 0),
    ("gossip", {}, [1] * 8, 0),
    ("gossip", {"graph": "exponential", "every": 2}, [2] * 4, 0),
    ("gossip", {"graph": "shift_one"}, [1] * 7, 0),
    ("noloco", {"every": 4}, [1] * 8, 0),
    ("noloco", {"every": 3}, [3, 2], 0),
    ("easgd", {"every": 4}, [1] * 8, 1),
    ("easgd", {"every": 2}, [2] * 4, 2),
    ("downpour", {}, [1] * 8, 1),
    ("downpour", {}, [1] * 6, 2),
    ("downpour", {"push_every": 2, "pull_every": 3}, [2] * 3, 1),
    ("gem", {}, [1] * 4, 1),
    ("async_diloco", {"every": 4}, [1] * 4, 1),
]


@pytest.mark.parametrize(("name", "options", "hosts", "servers"), CASES)
def test_a_replay_takes_as_long_as_the_strategy_itself(
    name: str, options: dict[str, Any], hosts: list[int], servers: int
) -> None:
    strategy, steps = named(name)(**options), 40
    ends, staleness = run(strategy, hosts, SLOW, steps, servers, seed=3)
    pattern = CommPattern(strategy, "sgd", PARAMETERS, servers)
    timing = replay(pattern, hosts, SLOW, TIMES, steps, seed=3)
    assert timing.seconds == pytest.approx(ends.max(), rel=0.01)
    assert timing.steps_per_s == pytest.approx((steps / ends).mean(), rel=0.01)
    assert timing.staleness == pytest.approx(staleness, rel=0.05)


@pytest.mark.parametrize(
    ("name", "hosts", "network"),
    [
        ("noloco", [2] * 4, replace(SLOW, topology=Sites(2, 50e6, 2e-3))),
        ("gossip", [1] * 6, replace(SLOW, topology=FatTree(2, 4.0))),
        ("downpour", [1] * 6, replace(SLOW, topology=Sites(2, 50e6, 2e-3))),
        ("downpour", [1] * 4, replace(SLOW, overhead_s=50e-6)),
        ("sync", [2] * 4, replace(SLOW, topology=FatTree(2, 4.0))),
    ],
)
def test_messages_contend_where_they_share_a_port(name: str, hosts: list[int], network: Network) -> None:
    strategy = named(name)(**({"every": 2} if name == "noloco" else {}))
    servers = int(name == "downpour")
    ends, _ = run(strategy, hosts, network, 20, servers, seed=3)
    pattern = CommPattern(strategy, "sgd", PARAMETERS, servers)
    timing = replay(pattern, hosts, network, TIMES, 20, seed=3)
    assert timing.seconds == pytest.approx(ends.max(), rel=0.01)
    assert timing.seconds > 1.05 * replay(pattern, hosts, SLOW, TIMES, 20, seed=3).seconds


def replayed(name: str, hosts: Sequence[int] = (1, 1, 1, 1), **options: Any) -> Replayed:
    pattern = CommPattern(named(name)(), "sgd", PARAMETERS, int(name == "downpour"))
    return replay(pattern, hosts, Network.free(), StepTimes((1e-3, 1e-3)), 40, **options)


@pytest.mark.parametrize("name", ["local", "gossip", "easgd"])
def test_a_replay_gives_the_same_bits_every_time(name: str) -> None:
    pattern = CommPattern(named(name)(), "sgd", PARAMETERS, int(name == "easgd"))
    found = [replay(pattern, [2, 2, 1], SLOW, TIMES, 30, seed=seed) for seed in (5, 5, 6)]
    assert found[0] == found[1] != found[2]


def test_a_slow_host_delays_all_synchronous_workers_but_no_free_ones() -> None:
    speeds = [1.0, 1.0, 1.0, 0.5]
    assert replayed("sync", speeds=speeds).steps_per_s == pytest.approx(500)
    assert replayed("downpour", speeds=speeds).steps_per_s == pytest.approx((3 * 1000 + 500) / 4)


def test_a_step_waits_for_its_input() -> None:
    assert replayed("sync", input_batches_per_s=200).steps_per_s == pytest.approx(200)
    assert replayed("sync", input_batches_per_s=2000).steps_per_s == pytest.approx(1000)


def test_goodput_is_that_of_the_failures() -> None:
    failures = Failures(1.0, 60.0, 300.0, 30.0)
    assert replayed("sync", failures=failures).goodput == goodput(failures, Pace.TOGETHER, 4, 0) < 1
    assert replayed("sync").goodput == 1


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hosts": []}, "at least 1 of each"),
        ({"speeds": [1.0]}, "one for each host"),
        ({"speeds": [1.0, 1.0, 1.0, 0.0]}, "numbers above 0"),
        ({"input_batches_per_s": 0.0}, "expected more than 0"),
    ],
)
def test_impossible_replays_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replayed("sync", **wrong)
