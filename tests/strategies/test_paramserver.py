"""The synchronous parameter server equals sequential training, and drops what comes after its quorum."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn, optim

from tests.strategies.alone import Setting, assert_close, gradient, run, sgd, start
from tests.strategies.sequential import Case, by_strategy, distance, sequential
from tutti.comm.virtual import VirtualWorld
from tutti.errors import BadOption
from tutti.strategies import Clip, ParamServer

LR = 0.1


def mlp(dtype: torch.dtype = torch.float64) -> nn.Module:
    return nn.Sequential(nn.Linear(12, 37), nn.Tanh(), nn.Linear(37, 5)).to(dtype)


def case(clip: Clip, steps: int = 20) -> Case:
    return Case(
        mlp,
        lambda module: optim.Adam(module.parameters(), lr=0.01),
        steps=steps,
        clip=clip,
        schedule=lambda optimizer: optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
        dtype=torch.float64,
    )


@pytest.mark.parametrize("clip", [Clip(), Clip(norm=0.05, value=0.01)], ids=str)
@pytest.mark.parametrize("ranks", [1, 3, 40])
def test_with_all_workers_it_is_sequential_training(ranks: int, clip: Clip) -> None:
    expected = sequential(case(clip))
    found = VirtualWorld(ranks).run(by_strategy, case(clip), ParamServer())
    assert distance(found[0], expected) < 1e-11
    for other in found[1:]:
        assert torch.equal(other, found[0])


def with_quorum(quorum_of: int, speeds: tuple[float, ...], steps: int) -> tuple[Tensor, dict[int, int]]:
    """The centre and how many gradients of each worker came late, by the paper's algorithm 4."""
    workers, centre, version, came = len(speeds), start(), 0, dict[int, Tensor]()
    weights = dict.fromkeys(range(workers), (centre, 0))
    free_at, done = dict(enumerate(speeds)), dict.fromkeys(range(workers), 0)
    late, waiting = dict.fromkeys(range(workers), 0), set[int]()
    while free_at:
        rank = min(free_at, key=lambda one: free_at[one])
        now = free_at.pop(rank)
        g = gradient(weights[rank][0], rank, done[rank])
        done[rank] += 1
        released = {rank}
        if weights[rank][1] < version:
            late[rank] += 1
        else:
            came[rank] = g
            waiting.add(rank)
            released = set()
        active = sum(1 for one in range(workers) if done[one] < steps or one in waiting)
        if came and len(came) >= min(quorum_of, active):
            centre = centre - LR * workers / len(came) * torch.stack(list(came.values())).sum(0)
            version += 1
            released |= waiting
            came, waiting = {}, set()
        for one in released:
            weights[one] = centre, version
            if done[one] < steps:
                free_at[one] = now + speeds[one]
    return centre, late


@pytest.mark.parametrize("servers", [0, 1, 2])
def test_late_gradients_are_dropped_and_counted(servers: int) -> None:
    # Worker 2 needs as long as five steps of the others; alone in the end, it makes steps by itself.
    speeds, steps = (1.0, 1.1, 5.73), 6
    found = run(Setting(ParamServer(quorum=0.6), sgd(LR), steps, speeds), VirtualWorld(3, servers=servers))
    centre, late = with_quorum(2, speeds, steps)
    assert late[2] > 0
    assert {rank: outcome.traffic.dropped for rank, outcome in enumerate(found)} == late
    assert_close(found[0].final, centre)


def test_a_quorum_does_not_wait_for_the_slowest() -> None:
    speeds = (1.0, 1.0, 1.0, 4.0)
    everyone, most = [run(Setting(ParamServer(quorum=quorum), sgd(LR), 8, speeds)) for quorum in (1.0, 0.75)]
    assert everyone[0].traffic.wait_s == pytest.approx(8 * 3.0, abs=0.1)
    assert most[0].traffic.wait_s < 0.1


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("clip", [Clip(), Clip(norm=0.5)], ids=str)
def test_servers_do_what_shared_memory_does(servers: int, clip: Clip) -> None:
    setting = Setting(ParamServer(), sgd(LR, momentum=0.9), clip=clip)
    world = VirtualWorld(3, (2, 1), servers=servers)
    assert_close(run(setting, world)[0].final, run(setting)[0].final)


def test_the_same_run_twice_is_bit_equal() -> None:
    setting = Setting(ParamServer(quorum=0.5), sgd(LR), clip=Clip(norm=0.5))
    assert torch.equal(run(setting)[0].final, run(setting)[0].final)


def test_an_evaluation_in_between_changes_nothing() -> None:
    settings = [Setting(ParamServer(), sgd(LR), settle_at=at) for at in (-1, 4)]
    assert_close(run(settings[0])[0].final, run(settings[1])[0].final)


@pytest.mark.parametrize("quorum", [0.0, 1.1, "most"])
def test_values_that_cannot_be_used_are_refused(quorum: float) -> None:
    with pytest.raises(BadOption, match=r"'quorum' .* expected a number"):
        ParamServer(quorum=quorum)


def test_it_has_one_level() -> None:
    world = partial(VirtualWorld, 3, (2, 1), servers=1, levels=2)
    with pytest.raises(BadOption, match="--levels 1"):
        run(Setting(ParamServer(), sgd(LR)), world())
