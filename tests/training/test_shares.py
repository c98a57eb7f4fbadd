"""What a training loop tells a worker before each step, and what it leaves out for one that is late."""

from __future__ import annotations

from functools import partial

import pytest

from tests.contracts.training import Run, clouds, train
from tutti.comm.virtual.world import VirtualWorld
from tutti.strategies import ParamServer, Sync
from tutti.strategies.sync import SyncWorker


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The shares that `sync`'s workers have at their steps."""
    shares: list[float] = []
    step = SyncWorker.step

    def noting(worker: SyncWorker) -> None:
        shares.append(worker.share)
        step(worker)

    monkeypatch.setattr(SyncWorker, "step", noting)
    return shares


@pytest.mark.parametrize("passes", [1, 2])
def test_a_worker_is_told_its_share_of_each_update(told: list[float], passes: int) -> None:
    VirtualWorld(4).run(train, Run(Sync(every=passes), data=partial(clouds, 9), epochs=1))
    assert sorted(told) == [0.0] * 3 + [0.25] * 4 + [1.0]


def test_a_late_worker_leaves_out_what_the_others_have_done() -> None:
    speeds = (1e-3, 1e-3, 50e-3)
    found = {
        quorum: VirtualWorld(3).run(train, Run(ParamServer(quorum=quorum), speeds=speeds, batch_size=9))
        for quorum in (1.0, 0.6)
    }
    everyone, most = (found[quorum][0] for quorum in (1.0, 0.6))
    assert [record.train.samples for record in everyone.history] == [100, 100]
    late = most.history[0].ranks[2]
    assert late.skipped > 3
    assert late.dropped >= 1
    assert 67 <= most.history[0].train.samples < 90
    assert most.seconds < everyone.seconds / 3
