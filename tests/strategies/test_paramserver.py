"""The synchronous parameter server equals sequential training, and drops what comes after its quorum."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn, optim

from tests.strategies.alone import Point, Setting, assert_close, gradient, run, sgd, start
from tests.strategies.sequential import Case, by_strategy, distance, sequential
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.replica import Replica
from tutti.strategies import Clip, ParamServer
from tutti.strategies.placement import place

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


@dataclass
class Late:
    """How many gradients of a worker were computed in vain, and how many steps it left out."""

    dropped: int = 0
    skipped: int = 0


def with_quorum(enough: int, speeds: tuple[float, ...], steps: int, skips: bool) -> tuple[Tensor, list[Late]]:
    """The centre, and what became of the workers' late gradients, by the paper's algorithms 3 and 4.

    A worker computes the gradient of a step at the weights of that step, which it has when the step before is
    closed; the first `enough` close it.
    """
    workers, centre, closed_at = range(len(speeds)), start(), [0.0]
    free_at, late = [0.0 for _ in workers], [Late() for _ in workers]
    for step in range(steps):
        begins = [max(at, closed_at[step]) for at in free_at]
        comes = {rank: begins[rank] + speeds[rank] for rank in workers}
        first = sorted(comes, key=lambda rank: comes[rank])[:enough]
        closes = comes[first[-1]]
        gradients = [gradient(centre, rank, step) for rank in first]
        centre = centre - LR * len(speeds) / enough * torch.stack(gradients).sum(0)
        closed_at.append(closes)
        for rank in workers:
            if rank in first:
                free_at[rank] = closes
            elif begins[rank] >= closes and skips:
                late[rank].skipped += 1
            else:
                late[rank].dropped += 1
                free_at[rank] = comes[rank]
    return centre, late


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("servers", [0, 1, 2])
def test_late_gradients_are_dropped_and_steps_missed_are_left_out(servers: int, skips: bool) -> None:
    # Worker 2 needs as long as some five steps of the others.
    speeds, steps = (1.0, 1.1, 5.73), 16
    setting = Setting(ParamServer(quorum=0.6), sgd(LR), steps, speeds, skips=skips)
    found = run(setting, VirtualWorld(3, servers=servers))
    centre, late = with_quorum(2, speeds, steps, skips)
    assert late[2].dropped > 1
    assert (late[2].skipped > 1) == skips
    assert [Late(one.traffic.dropped, one.traffic.skipped) for one in found] == late
    assert_close(found[0].final, centre)
    # Whoever leaves out what it has missed keeps nobody waiting in the end.
    assert (found[0].seconds < 16 * 1.1 + 5.73) == skips


def shares(comm: Communicator, quorum: float, dealt: list[list[int]]) -> list[tuple[float, int]]:
    """The centre after each step of workers whose samples all have their rank + 1 as gradient.

    Those with few samples come first.
    """
    module = Point()
    optimizer = sgd(1.0)(module)
    strategy = ParamServer(quorum=quorum)
    if comm.servers is not None and comm.servers.serving:
        strategy.serve(comm.servers, Replica(module), optimizer, Clip())
        return []
    replica = place(module, comm, strategy.home)
    with torch.no_grad():
        module.first.zero_()
    worker = strategy.worker(replica, comm, optimizer, Clip())
    found = []
    for samples in dealt:
        worker.share = samples[comm.rank] / sum(samples) if sum(samples) else 0.0
        replica.flats[0].grads.fill_((comm.rank + 1) * worker.share)
        comm.compute(1e-3 + samples[comm.rank] + 1e-6 * comm.rank)
        worker.step()
        found.append((float(module.first[0].detach()), worker.traffic.dropped))
    worker.finish()
    comm.barrier()
    return found


@pytest.mark.parametrize("servers", [0, 1])
def test_a_quorum_counts_samples_not_workers(servers: int) -> None:
    """Workers without samples come first, and close nothing."""
    found = VirtualWorld(4, servers=servers).run(shares, 0.5, [[1, 0, 0, 0]])
    assert found[:4] == [[(-1.0, 0)]] * 4
    # The mean over the samples of the workers 1 and 2 (3 of 6 samples); worker 0 is late.
    found = VirtualWorld(3, servers=servers).run(shares, 0.5, [[3, 1, 2]])
    assert [steps[0][0] for steps in found[:3]] == pytest.approx([-(2 * 1 + 3 * 2) / 3] * 3, abs=1e-12)
    assert [steps[0][1] for steps in found[:3]] == [1, 0, 0]


@pytest.mark.parametrize("quorum", [0.5, 1.0])
def test_a_step_without_any_sample_moves_nothing_and_is_closed(quorum: float) -> None:
    found = VirtualWorld(3).run(shares, quorum, [[0, 0, 0], [1, 1, 1]])
    assert found[0][0][0] == 0.0
    assert found[0][1][0] != 0.0


@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize("clip", [Clip(), Clip(norm=0.5)], ids=str)
def test_servers_do_what_shared_memory_does(servers: int, clip: Clip) -> None:
    setting = Setting(ParamServer(), sgd(LR, momentum=0.9), clip=clip)
    world = VirtualWorld(3, (2, 1), servers=servers)
    assert_close(run(setting, world)[0].final, run(setting)[0].final)


def test_a_late_worker_waits_for_no_other() -> None:
    """As in a loop of one's own, where the ranks meet to deal batches, and none leaves out a step."""

    def train(comm: Communicator) -> int:
        module, strategy = Point(), ParamServer(quorum=0.6)
        replica = place(module, comm, strategy.home)
        worker = strategy.worker(replica, comm, sgd(LR)(module), Clip())
        for _ in range(3):
            for _ in range(4):
                replica.flats[0].grads.fill_(1.0)
                comm.compute((1.0, 1.1, 6.0)[comm.rank])
                worker.step()
            comm.barrier()
        worker.finish()
        return worker.traffic.dropped

    assert VirtualWorld(3).run(train) == [0, 0, 12]
