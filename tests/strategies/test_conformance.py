"""Every strategy does what strategies must do: on virtual ranks, on the processes of a host, and over MPI."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest

from tests.comm.ranks import World
from tests.contracts.strategy import CHECKS, NAMES, Setting, brisk, faults_of_going_on, leave_each, setting
from tests.contracts.training import Run, clouds, train_until_killed
from tests.mpi.mpirun import mpirun, needs_mpirun, results
from tutti.errors import PeerLost
from tutti.strategies import STRATEGIES, Strategy

RANKS = 3


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_virtual_ranks(check: Callable[[type[Strategy], Setting], None], name: str) -> None:
    check(STRATEGIES[name], setting(STRATEGIES[name]))


def test_new_processes_resume_where_others_stopped() -> None:
    """By every strategy of the table, in one start of processes."""
    with World(RANKS, cores=2) as world:
        left = world.run(leave_each)
    assert all(one.keys() == set(NAMES) for one in left)
    with World(RANKS, cores=2) as world:
        assert not any(faults := world.run(faults_of_going_on, left)), faults


@pytest.mark.parametrize("name", ["sync", "paramserver", "adpsgd"])
def test_the_loss_of_a_process_is_noticed_by_all_others(name: str) -> None:
    run = Run(brisk(STRATEGIES[name]), data=partial(clouds, 40), epochs=100_000)
    with World(RANKS, cores=2) as world:
        world.start(train_until_killed, run, RANKS - 1, 30)
        for survivor in range(RANKS - 1):
            error = world.outcome(survivor)
            assert isinstance(error, PeerLost), error
            assert RANKS - 1 in error.ranks


@pytest.mark.mpi
@needs_mpirun
@pytest.mark.timeout(240)
def test_ranks_under_mpirun_learn_resume_and_end_with_equal_weights() -> None:
    """Two hosts, and fewer epochs; a strategy with a centre has a server there, and all have been seen on one
    host above.
    """
    done = mpirun(4, "conformance.py", "aabb", timeout_s=200.0)
    assert done.returncode == 0, done.stderr
    learnt, faults = results(done)
    assert faults == []
    assert learnt.keys() == set(NAMES)
    for name, (accuracy, alike) in learnt.items():
        assert accuracy >= 0.9, name
        assert alike, name
