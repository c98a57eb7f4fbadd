"""Every strategy does what strategies must do: on virtual ranks, on the processes of a host, and over MPI."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import pytest

import tutti
from tests.comm.ranks import World
from tests.contracts.strategy import (
    CHECKS,
    NAMES,
    Setting,
    assert_alike,
    brisk,
    faults_of_going_on,
    learning,
    leave_each,
    setting,
)
from tests.contracts.training import Run, clouds, train, train_until_killed
from tests.mpi.mpirun import mpirun, needs_mpirun, results
from tutti.errors import BadOption, PeerLost
from tutti.strategies import STRATEGIES, Strategy

RANKS = 3
PARALLEL = [name for name in NAMES if brisk(STRATEGIES[name]).most_workers != 1]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test_on_virtual_ranks(check: Callable[[type[Strategy], Setting], None], name: str) -> None:
    check(STRATEGIES[name], setting(STRATEGIES[name]))


class Processes:
    """A world of processes for one test after the other; a new one after a test that broke it."""

    def __init__(self) -> None:
        self._stack, self._world = ExitStack(), None

    def run(self, function: Callable, *arguments: object) -> list:
        if self._world is None:
            self._world = self._stack.enter_context(World(RANKS, cores=2))
        try:
            return self._world.run(function, *arguments)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._world = None
        self._stack.close()


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    found = Processes()
    yield found
    found.close()


@pytest.mark.parametrize("name", PARALLEL)
def test_processes_of_a_host_learn_and_end_with_the_same_weights(name: str, processes: Processes) -> None:
    """In fewer epochs than virtual ranks: all that is looked at is whether they learn together."""
    known = replace(setting(STRATEGIES[name]), epochs=4)
    found = processes.run(train, learning(STRATEGIES[name], known))
    for outcome in found:
        assert_alike(outcome, found[0])
    assert found[0].accuracy >= 0.9


def test_new_processes_go_on_where_others_have_stopped(processes: Processes) -> None:
    """By every strategy of the table, in one start of processes."""
    left = processes.run(leave_each)
    processes.close()
    assert all(one.keys() == set(NAMES) for one in left)
    assert not any(faults := processes.run(faults_of_going_on, left)), faults


@pytest.mark.parametrize("name", PARALLEL)
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
def test_ranks_under_mpirun_learn_go_on_and_end_with_the_same_weights() -> None:
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


@pytest.mark.parametrize(
    ("strategy", "world", "remedy"),
    [
        ("solo", {"workers": 2}, "or strategy sync"),
        ("sync", {"workers": 2, "servers": 1}, "such as strategy downpour"),
    ],
)
def test_an_unfit_world_is_refused(strategy: str, world: dict[str, object], remedy: str) -> None:
    with pytest.raises(BadOption, match=remedy):
        tutti.train(strategy=strategy, quiet=True, **world)
