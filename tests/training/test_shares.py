"""What a training loop tells a worker before each step, and what it leaves out for one that is late."""

from __future__ import annotations

from tests.contracts.training import Run, train
from tutti.comm.virtual.world import VirtualWorld
from tutti.strategies import ParamServer


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
