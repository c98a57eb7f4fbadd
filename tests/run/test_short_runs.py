"""A run that is too short for a strategy is warned of."""

from __future__ import annotations

import pytest

from tutti.comm.virtual.world import VirtualWorld
from tutti.run.train import warn_if_short
from tutti.strategies import (
    ADPSGD,
    EASGD,
    DiLoCo,
    Downpour,
    EASGDSync,
    Gossip,
    Local,
    ParamServer,
    Strategy,
    Sync,
)

pytestmark = pytest.mark.usefixtures("nothing_beside")

PERIODS = [
    (EASGD(every=7), 7),
    (EASGDSync(every=7), 7),
    (DiLoCo(every=7), 7),
    (Local(every=7), 7),
    (Local(every=7, after=1), 1),
    (Gossip(every=7), 7),
    (ADPSGD(every=7), 7),
    (Downpour(push_every=2, pull_every=7), 7),
    (Downpour(push_every=7, pull_every=2), 7),
    (Sync(every=7), 1),
    (ParamServer(), 1),
]


@pytest.mark.parametrize(("strategy", "period"), PERIODS, ids=str)
def test_a_run_no_longer_than_the_period_is_warned_of(
    strategy: Strategy, period: int, capsys: pytest.CaptureFixture[str]
) -> None:
    for steps, warned in ((period, period > 1), (period + 1, False)):
        VirtualWorld(2).run(lambda comm, steps=steps: warn_if_short(strategy, steps, comm))
        said = capsys.readouterr().err
        assert said.count("tutti: warning") == warned
        if warned:
            assert f"{steps} steps" in said
            assert strategy.name in said


def test_one_worker_exchanges_nothing_and_needs_no_warning(capsys: pytest.CaptureFixture[str]) -> None:
    VirtualWorld(1).run(lambda comm: warn_if_short(EASGD(), 1, comm))
    assert capsys.readouterr().err == ""
