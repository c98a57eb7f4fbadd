"""Anonymous files (memfds) that processes of one user on one host share; no file system has a name for them.

A process tells another one where it has such a file open: two numbers. They may have come through a store
that other users can write to, so the file is checked before it is used.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, NamedTuple, cast

if TYPE_CHECKING:
    from tutti.comm.base import Communicator

_PREFIX: Final = "tutti"

LARGEST: Final = 1 << 44
"""Bytes: more than any host has."""


class FileAddress(NamedTuple):
    """The address of an anonymous file: a process, and its descriptor of the file."""

    process: int
    descriptor: int

    @classmethod
    def of(cls, descriptor: int) -> FileAddress:
        """Return the address of a file that this process has open."""
        return cls(os.getpid(), descriptor)

    @classmethod
    def parse(cls, text: str) -> FileAddress:
        """Return the address that `str` wrote."""
        process, _, descriptor = text.partition(" ")
        if not (process.isdecimal() and descriptor.isdecimal()):
            raise ValueError(f"{text[:80]!r} is no address of shared memory: expected two numbers")
        return cls(int(process), int(descriptor))

    def __str__(self) -> str:
        return f"{self.process} {self.descriptor}"

    def open(self, flags: int = 0) -> int:
        """Return a descriptor of the file, to read and write, with its own file description.

        OSError: the process is gone, belongs to another user or lives in another container. ValueError: the
        file is not an anonymous one of this user.
        """
        fd = os.open(f"/proc/{self.process}/fd/{self.descriptor}", os.O_RDWR | os.O_CLOEXEC | flags)
        try:
            check(fd)
        except ValueError:
            os.close(fd)
            raise
        return fd


def make(what: str) -> int:
    """Return the descriptor of a new, empty file; its purpose `what` shows in /proc."""
    return os.memfd_create(f"{_PREFIX}-{what}", os.MFD_CLOEXEC)


def make_roomy(what: str, size: int = LARGEST) -> int:
    """Return the descriptor of a new file of `size` bytes; only what is written takes memory.

    It never has to grow, so a limit on the size of files fails now, or never.
    """
    fd = make(what)
    try:
        os.ftruncate(fd, size)
    except OSError:
        os.close(fd)
        raise
    return fd


def make_for_all(what: str, comm: Communicator) -> int:
    """Return a descriptor of one new file that all ranks have (collective over ranks of one host)."""
    file = make(what) if comm.rank == 0 else None
    address = comm.broadcast_object(None if file is None else FileAddress.of(file))
    if file is None:
        file = open_of_rank(cast("FileAddress", address), comm)
    # Until all have opened it, rank 0 has to live.
    comm.barrier()
    return file


def open_of_rank(address: FileAddress, comm: Communicator) -> int:
    """Return a descriptor of another rank's file; on failure raise PeerLost if that rank has ended."""
    try:
        return address.open()
    except FileNotFoundError:
        comm.barrier()  # This says who is lost.
        raise


def check(fd: int) -> None:
    """Raise a ValueError if a descriptor is no anonymous file of this user."""
    what = os.readlink(f"/proc/self/fd/{fd}")
    if not what.startswith(f"/memfd:{_PREFIX}") or os.fstat(fd).st_uid != os.geteuid():
        raise ValueError(f"descriptor {fd} is {what[:80]!r}, not shared memory of tutti and of this user")
