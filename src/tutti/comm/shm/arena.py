"""The memory that the processes of one host share: one mapped file that has no name in any file system.

    ┌ header page ┬ control block ┬ weights ┬ gradients ┬ ... ──────────────── 16 TiB, nothing of it real
    │ next free ──┼───────────────┼─────────┼───────────┼──▶                   until it is first written
    └─────────────┴───────────────┴─────────┴───────────┘

An allocation is [1] lock the header's byte, [2] load the offset of what is free, [3] add the length to it and
store it, [4] unlock. The kernel's lock orders [2] and [3] of one process before those of the next. No offset
is given out twice: `release` gives up the memory and keeps the addresses (there are enough), so that
what is allocated is always new, and zero.

The file is a memfd: when the last process that has it open or mapped is gone, so is the file, however that
process ended. Processes get it as an inherited descriptor, or open it through /proc.

POSIX takes all of a process's byte-range locks on a file away when the process closes *any* descriptor of
that file. So a process keeps exactly one descriptor of an arena, and nothing here may duplicate it: mappings
are made with the C library's mmap, because Python's keeps a duplicate of the descriptor for each mapping and
`torch.from_file` opens another.
"""

from __future__ import annotations

import ctypes
import fcntl
import math
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Final

from tutti.comm.shm import memfd
from tutti.comm.shm.memfd import LARGEST, FileAddress
from tutti.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PAGE: Final = mmap.PAGESIZE

FIRST: Final = PAGE
"""The offset of the first allocation of an arena."""

ROOT: Final = 24
"""The offset of a word for the processes that share an arena: where others find what one has put there."""

_MAGIC: Final = 0x74757474692D31
_MAGIC_WORD, _NEXT_WORD, _SIZE_WORD = 0, 1, 2
_HEADER_WORDS: Final = PAGE // 8
_KEEP_SIZE_AND_PUNCH_HOLE: Final = 0x1 | 0x2

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


class Arena:
    """One host's shared memory. Make one with `create`, `attach` or `open`."""

    def __init__(self, fd: int) -> None:
        self.fd = fd  # the only descriptor of this process; child processes get it by `pass_fds`
        self._header = self.words(0, _HEADER_WORDS)
        self._allocating = ByteLock(self, 0)

    @classmethod
    def create(cls, size: int = LARGEST) -> Arena:
        """Make an empty arena."""
        try:
            arena = cls(memfd.make_roomy("arena", size))
        except OSError as error:
            raise UserError(
                f"the system grants no shared memory: {error.strerror}; raise the limits on the size of "
                "files and of memory: ulimit -f unlimited -v unlimited"
            ) from error
        arena._header[_NEXT_WORD], arena._header[_SIZE_WORD] = FIRST, size
        # Last, for a process that opens the file by its address meanwhile.
        arena._header[_MAGIC_WORD] = _MAGIC
        return arena

    @classmethod
    def attach(cls, fd: int) -> Arena:
        """Return the arena behind an inherited descriptor, which now belongs to the returned object."""
        memfd.check(fd)
        if os.fstat(fd).st_size < PAGE or (arena := cls(fd))._header[_MAGIC_WORD] != _MAGIC:
            raise ValueError(
                f"descriptor {fd} is no arena: it has no such header; pass on the `fd` of an Arena"
            )
        return arena

    @classmethod
    def open(cls, address: FileAddress) -> Arena:
        """Return the arena of another process of this host and user, by that process's `address`.

        OSError: the process is gone, belongs to another user or lives in another container. ValueError: the
        file is no arena of this user.
        """
        fd = address.open()
        try:
            return cls.attach(fd)
        except ValueError:
            os.close(fd)
            raise

    @property
    def address(self) -> FileAddress:
        """The address for other processes of this host to open the arena, as long as this process lives."""
        return FileAddress.of(self.fd)

    def allocate(self, nbytes: int) -> int:
        """Return the offset, a multiple of the page size, of new memory, all zero."""
        # Rounded up to whole pages: `release` can free nothing less.
        length = max(PAGE, -(-nbytes // PAGE) * PAGE)
        with self._allocating:  # [1], [4]
            offset, size = self._header[_NEXT_WORD], self._header[_SIZE_WORD]  # [2]
            if offset + length > size:
                raise MemoryError(
                    f"the host's shared memory has room for {size} bytes in all, {offset} are given away and "
                    f"{nbytes} more were asked for; raise the limit on file size (ulimit -f unlimited)"
                )
            self._header[_NEXT_WORD] = offset + length  # [3]
        return offset

    def release(self, offset: int, nbytes: int) -> None:
        """Give the pages of an allocation back to the system. They read as zero from then on."""
        length = -(-nbytes // PAGE) * PAGE
        if length and _libc.fallocate(self.fd, _KEEP_SIZE_AND_PUNCH_HOLE, offset, length) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"cannot give back {length} bytes of shared memory: {os.strerror(code)}")

    def release_from(self, offset: int = FIRST) -> None:
        """Release what was allocated from an offset on, by default all."""
        self.release(offset, self._header[_NEXT_WORD] - offset)

    def words(self, offset: int, count: int) -> memoryview:
        """Return `count` 64-bit integers from `offset` (a multiple of 8) on, mapped while they are used."""
        return memoryview(_map(self.fd, offset, count * 8)).cast("B").cast("q")

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a tensor over the memory from `offset` on, mapped while it or a view of it is used."""
        import torch

        count = math.prod(shape)
        if count == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        mapped = _map(self.fd, offset, count * dtype.itemsize)
        return torch.frombuffer(mapped, dtype=dtype).view(shape)

    def lock(self, offset: int) -> ByteLock:
        """Return the lock that belongs to the byte at `offset`."""
        return ByteLock(self, offset)

    def close(self) -> None:
        """Close the descriptor, which frees this process's locks. What is in use stays mapped."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class ByteLock:
    """A lock of the kernel on one byte of an arena, for `with`.

    It excludes the other processes, not the threads of this one; waiting for it sleeps; the kernel frees it
    when its owner dies. The byte itself is neither read nor written.
    """

    def __init__(self, arena: Arena, offset: int) -> None:
        self._arena, self._offset = arena, offset

    def __enter__(self) -> None:
        fcntl.lockf(self._arena.fd, fcntl.LOCK_EX, 1, self._offset)

    def __exit__(self, *_: object) -> None:
        fcntl.lockf(self._arena.fd, fcntl.LOCK_UN, 1, self._offset)


def _map(fd: int, offset: int, nbytes: int) -> ctypes.Array[ctypes.c_char]:
    """Map a part of the file; it is unmapped when nothing uses the returned buffer any more."""
    start = offset // PAGE * PAGE
    length = offset + nbytes - start
    address = _libc.mmap(None, length, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, start)
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, f"cannot map {length} bytes of shared memory: {os.strerror(code)}")
    mapped = (ctypes.c_char * nbytes).from_address(address + offset - start)
    # At exit the system unmaps; doing so here would pull the memory from under threads that still run.
    weakref.finalize(mapped, _libc.munmap, address, length).atexit = False
    return mapped
