"""The arena: one anonymous file per host, given out in pieces."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tutti.comm.shm.arena import PAGE, Arena

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.create()
    yield arena
    arena.close()


def begin(code: str, *arguments: object, fds: tuple[int, ...] = ()) -> subprocess.Popen[str]:
    """Run `code` in another process, which inherits the descriptors."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        pass_fds=fds,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def mappings(arena: Arena) -> int:
    """How many mappings of the arena this process has."""
    gc.collect()
    inode = str(os.fstat(arena.fd).st_ino)
    with open("/proc/self/maps") as file:
        return sum("memfd:tutti" in line and line.split()[4] == inode for line in file)


def test_allocations_are_page_aligned_zero_and_apart(arena: Arena) -> None:
    offsets = [arena.allocate(nbytes) for nbytes in (1, PAGE, PAGE + 1, 0, 100)]
    assert all(offset % PAGE == 0 and offset > 0 for offset in offsets)
    gaps = [after - before for before, after in itertools.pairwise(offsets)]
    assert gaps == [PAGE, PAGE, 2 * PAGE, PAGE]
    assert not any(arena.words(offsets[2], PAGE // 8 + 1))


def test_processes_allocate_at_the_same_time(arena: Arena) -> None:
    code = """if True:
        import sys
        from tutti.comm.shm.arena import Arena
        arena = Arena.attach(int(sys.argv[1]))
        sys.stdin.readline()
        print(*[arena.allocate(100) for _ in range(300)])"""
    processes = [begin(code, arena.fd, fds=(arena.fd,)) for _ in range(3)]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    offsets = [int(word) for process in processes for word in process.communicate()[0].split()]
    assert len(offsets) == len(set(offsets)) == 900


def test_another_process_opens_the_arena_by_its_address(arena: Arena) -> None:
    offset = arena.allocate(16)
    arena.words(offset, 2)[1] = 41
    code = """if True:
        import sys
        from tutti.comm.shm.memfd import FileAddress
        from tutti.comm.shm.arena import Arena
        words = Arena.open(FileAddress.parse(sys.argv[1])).words(int(sys.argv[2]), 2)
        words[0] = words[1] + 1"""
    with begin(code, arena.address, offset) as process:
        process.communicate()
    assert arena.words(offset, 1)[0] == 42


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64],
)
def test_tensors_of_every_dtype(arena: Arena, dtype: torch.dtype) -> None:
    offset = arena.allocate(24 * 8)
    tensor = arena.tensor(offset, (2, 3, 4), dtype)
    assert (tensor.shape, tensor.dtype) == ((2, 3, 4), dtype)
    assert tensor.is_contiguous()
    assert not tensor.any()
    tensor[1, 2, 3] = 1
    again = arena.tensor(offset, (24,), dtype)
    assert again[23] == 1
    assert not again[:23].any()


def test_views_keep_the_memory_mapped_and_the_last_one_unmaps_it(arena: Arena) -> None:
    before = mappings(arena)
    view = arena.tensor(arena.allocate(1 << 20), (1 << 18,), torch.float32)[5:10].fill_(2.0)
    assert mappings(arena) == before + 1
    assert view.sum() == 10.0
    del view
    assert mappings(arena) == before


def test_released_memory_goes_back_to_the_system(arena: Arena) -> None:
    offset = arena.allocate(1 << 22)
    tensor = arena.tensor(offset, (1 << 20,), torch.float32).fill_(1.0)
    full = os.fstat(arena.fd).st_blocks
    arena.release(offset, 1 << 22)
    assert full - os.fstat(arena.fd).st_blocks >= (1 << 22) // 512
    assert not tensor.any()


def test_an_arena_that_is_used_up_says_so() -> None:
    arena = Arena.create(size=1 << 20)
    arena.allocate(1 << 19)
    with pytest.raises(MemoryError, match="room for 1048576 bytes"):
        arena.allocate(1 << 19)
    arena.close()


@pytest.mark.parametrize("size", [0, 100, 2 * PAGE])
def test_a_file_that_is_no_arena_is_refused(size: int) -> None:
    fd = os.memfd_create("tutti")
    os.ftruncate(fd, size)
    with pytest.raises(ValueError, match="no arena"):
        Arena.attach(fd)
    os.close(fd)
