"""Checkpoints in memory on the host of rank 0, of ranks of which some are on another one."""

from __future__ import annotations

import os
import resource
from contextlib import closing
from dataclasses import replace
from typing import Any, cast

import pytest

from tests.checkpoint.states import check, state_of
from tests.comm.ranks import World
from tutti.checkpoint import memory_files
from tutti.checkpoint.in_memory import MemorySaver, kept_in
from tutti.checkpoint.memory_files import MemoryPlace, StateMemory
from tutti.comm.base import Communicator
from tutti.errors import BadCheckpoint


class TwoHosts:
    """The ranks of a host as if they were on two of them."""

    hosts = 2

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.node = comm.split(comm.rank // 2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._comm, name)


def on_two_hosts(comm: Communicator, place: MemoryPlace, apart: bool) -> tuple[Communicator, MemoryPlace]:
    """The communicator, and the memory, which the last two ranks do not see if the hosts are apart."""
    unseen = apart and comm.rank >= 2
    return cast("Communicator", TwoHosts(comm)), replace(place, token="00" * 16) if unseen else place


def save_often(comm: Communicator, memory: MemoryPlace, steps: list[int], apart: bool = True) -> None:
    comm, place = on_two_hosts(comm, memory, apart)
    with closing(MemorySaver(comm, place)) as saver:
        for step in steps:
            saver.save(step, state_of(comm.rank, 4, step), {"epoch": step})


def go_on(comm: Communicator, memory: MemoryPlace, step: int, apart: bool = True) -> bool:
    comm, place = on_two_hosts(comm, memory, apart)
    found = kept_in(comm, place)
    if found is None:
        return False
    assert (found.step, found.facts) == (step, {"epoch": step})
    check(found.saved(comm.rank, comm.size), comm.rank, comm.size, step, 4)
    return True


def test_ranks_of_both_hosts_go_on_from_the_last_copy() -> None:
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
            assert memory.place.whole == 2
            assert world.run(go_on, memory.place, 4) == [True] * 4


def flip_a_bit(memory: StateMemory, name: str) -> None:
    """Damage the last byte of a file of the newest copy."""
    (number, found), *_ = memory.place.described()
    start, size, _ = found["files"][name]
    with open(memory.place.copies[number - 1].open(), "r+b") as file:
        file.seek(start + size - 1)
        (byte,) = file.read(1)
        file.seek(start + size - 1)
        file.write(bytes([byte ^ 4]))


@pytest.mark.parametrize("apart", [True, False])
@pytest.mark.parametrize("name", ["rank-00000.safetensors", "rank-00003.safetensors", "rank-00001.json"])
def test_a_copy_that_is_damaged_is_not_gone_on_from(name: str, apart: bool) -> None:
    with closing(StateMemory()) as memory, World(4) as world:
        world.run(save_often, memory.place, [1, 2, 3], apart)
        flip_a_bit(memory, name)
        assert world.run(go_on, memory.place, 2, apart) == [True] * 4
        # It is the first one now, and the next copy does not overwrite it.
        assert world.run(go_on, memory.place, 2, apart) == [True] * 4
        world.run(save_often, memory.place, [4], apart)
        assert world.run(go_on, memory.place, 4, apart) == [True] * 4
        flip_a_bit(memory, name)
        assert world.run(go_on, memory.place, 2, apart) == [True] * 4
        flip_a_bit(memory, name)
        with pytest.raises(BadCheckpoint, match="no copy of the state in memory is as it was written"):
            world.run(go_on, memory.place, 2, apart)


def test_hosts_of_one_machine_see_the_memory_and_go_on_from_it() -> None:
    with closing(StateMemory()) as memory, World(4) as world:
        world.run(save_often, memory.place, [1], False)
        assert world.run(go_on, memory.place, 1, False) == [True] * 4


def test_memory_at_the_same_address_on_another_host_is_not_taken_for_it() -> None:
    with closing(StateMemory()) as one, closing(StateMemory()) as other:
        assert one.place.is_here()
        assert not replace(one.place, page=other.place.page).is_here()


def test_the_size_of_the_data_is_known_until_the_note_is_damaged() -> None:
    with closing(StateMemory()) as memory:
        assert memory.place.data_bytes is None
        for nbytes in (48_000_000, 7):
            memory.place.note_data(nbytes)
            assert memory.place.data_bytes == nbytes
        page, last = memory.place.page.open(), memory_files._DATA * memory_files._SLOT + memory_files._TEXT
        assert os.pread(page, 1, last) == b"7"
        os.pwrite(page, b"8", last)
        os.close(page)
        assert memory.place.data_bytes is None


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
