"""Checkpoints in memory on the host of rank 0, of ranks of which some are on another one."""

from __future__ import annotations

import resource
from contextlib import closing
from typing import Any, cast

from tests.checkpoint.states import check, state_of
from tests.comm.ranks import World
from tutti.checkpoint.memory_files import MemoryPlace, StateMemory
from tutti.checkpoint.reading import kept_in
from tutti.checkpoint.saver import MemorySaver
from tutti.comm.base import Communicator


class TwoHosts:
    """The ranks of a host as if they were on two of them."""

    hosts = 2

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.node = comm.split(comm.rank // 2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def save_often(comm: Communicator, place: MemoryPlace, steps: list[int]) -> None:
    with closing(MemorySaver(cast("Communicator", TwoHosts(comm)), place)) as saver:
        for step in steps:
            saver.save(step, state_of(comm.rank, 4, step), {"epoch": step})


def go_on(comm: Communicator, place: MemoryPlace, step: int) -> bool:
    found = kept_in(cast("Communicator", TwoHosts(comm)), place)
    if found is None:
        return False
    assert (found.step, found.facts) == (step, {"epoch": step})
    check(found.saved(comm.rank, comm.size), comm.rank, comm.size, step, 4)
    return True


def test_ranks_of_both_hosts_continue_from_the_last_copy() -> None:
    with closing(StateMemory()) as memory:
        with World(4) as world:
            assert world.run(go_on, memory.place, 0) == [False] * 4
            world.run(save_often, memory.place, [1, 2, 3])
            assert world.run(go_on, memory.place, 3) == [True] * 4
        with World(3) as world:
            # Others come after them, and the copies go on in turn.
            assert world.run(go_on, memory.place, 3) == [True] * 3
        with World(4) as world:
            world.run(save_often, memory.place, [4])
            assert memory.place.last.number == 2
            assert world.run(go_on, memory.place, 4) == [True] * 4


def save_under_a_limit(comm: Communicator, memory: MemoryPlace) -> None:
    with closing(MemorySaver(comm, memory)) as saver:
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))
        for step in (1, 2, 3):
            saver.save(step, state_of(comm.rank, 2, step), {"epoch": step})


def check_copy(comm: Communicator, memory: MemoryPlace, step: int) -> None:
    found = kept_in(comm, memory)
    assert found is not None
    assert found.step == step
    check(found.saved(comm.rank, comm.size), comm.rank, comm.size, step, 2)


def test_copies_need_no_room_for_files() -> None:
    with closing(StateMemory()) as memory:
        with World(2) as world:
            world.run(save_under_a_limit, memory.place)
        with World(2) as world:
            world.run(check_copy, memory.place, 3)
