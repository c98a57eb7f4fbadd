"""Memory for copies of the states of all ranks, shared with the process that writes them.

    memfd   │ rank 0: safetensors file │ head │ facts of the run │ rank 1: safetensors file │ ... 16 TiB
                      header, tensors    with room to grow                   nothing of it real

A rank maps only its own region. It has the layout of the files, so writing them needs no knowledge of
tensors.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, cast

import torch
from torch import Tensor

from tutti.checkpoint.encoding import EncodedState, encode
from tutti.comm.base import Communicator
from tutti.comm.shm import memfd
from tutti.comm.shm.memfd import FileAddress
from tutti.records.checkpoints import RUN, head_file, tensors_file
from tutti.records.json_lines import Json, to_json
from tutti.state import State

_PAGE: Final = mmap.ALLOCATIONGRANULARITY
_FILE_ALIGNMENT: Final = 64
_ROOM_FOR_TEXT: Final = 16 << 10
_TAG: Final = 0x7C4B
"""The tag of the messages with copies."""

_MADV_POPULATE_WRITE: Final = 23
"""Of Linux 5.14: give memory all its pages now, so that the copy need not wait for them."""

Places = dict[str, tuple[int, int]]
"""The offset and the size of each file of a checkpoint, by name."""

Sizes = tuple[int, ...]
"""The sizes of the files of a rank: tensors, head, and rank 0's facts of the run."""


@dataclass(frozen=True)
class Room:
    """The place of a rank's files in the memory."""

    start: int  # of its region
    most: Sizes  # how large each file may be

    @property
    def starts(self) -> list[int]:
        """Offset of each file in the region."""
        return [0, *accumulate(_round_up(most, _FILE_ALIGNMENT) for most in self.most)][:-1]

    @property
    def nbytes(self) -> int:
        """The size of the region."""
        return _round_up(sum(_round_up(most, _FILE_ALIGNMENT) for most in self.most), _PAGE)

    def holds(self, sizes: Sizes) -> bool:
        """Return whether files of these sizes have room."""
        return all(size <= most for size, most in zip(sizes, self.most, strict=True))


def rooms_for(sizes: Mapping[int, Sizes]) -> dict[int, Room]:
    """Return rooms for the files of some ranks, with space for texts to grow."""
    rooms, start = {}, 0
    for rank, (tensors, *texts) in sizes.items():
        rooms[rank] = Room(start, (tensors, *(2 * size + _ROOM_FOR_TEXT for size in texts)))
        start += rooms[rank].nbytes
    return rooms


class MemorySnapshot:
    """The copies of the states of all ranks, on the host of rank 0 (collective).

    `host` are the ranks that share memory with this one. `given` is the memory to copy to; None: it is made.
    """

    def __init__(self, comm: Communicator, host: Communicator, given: FileAddress | None = None) -> None:
        self._comm, self._host = comm, host
        leaders = comm.all_gather_objects(host.broadcast_object(comm.rank))
        self._senders = [rank for rank, leader in enumerate(leaders) if leader != 0]
        self._sends = comm.rank in self._senders
        self._rooms: dict[int, Room] = {}
        self._regions: dict[int, _Region] = {}
        self.memory: int | None = None  # the descriptor of all copies, on rank 0
        if comm.rank == 0:
            # Made at the beginning: under a later limit on the size of files it could not grow.
            self.memory = memfd.make_roomy("snapshot") if given is None else given.open()

    def take(self, state: State, facts: Json) -> Places:
        """Copy this rank's state and rank 0's facts (collective); return the files' places on rank 0."""
        rank = self._comm.rank
        encoded = encode(state, rank)
        texts = [encoded.head, *([to_json(facts).encode(errors="surrogatepass")] if rank == 0 else [])]
        gathered = self._comm.all_gather_objects((encoded.file_size, *map(len, texts)))
        sizes = dict(enumerate(cast("list[Sizes]", gathered)))
        if not self._rooms or not all(self._rooms[other].holds(needed) for other, needed in sizes.items()):
            self._regions.clear()
            self._rooms = rooms_for(sizes)
            self._make_room()
        self._regions[rank].copy(encoded, texts)
        if self._sends:
            for file in self._regions[rank].files(sizes[rank]):
                self._comm.send(file, 0, _TAG)
            return {}
        if rank == 0:
            for sender in self._senders:
                for file in self._regions[sender].files(sizes[sender]):
                    self._comm.recv(file, sender, _TAG)
        self._host.barrier()
        return self._places(sizes)

    def _places(self, sizes: Mapping[int, Sizes]) -> Places:
        found = {}
        for rank, its in sizes.items():
            room = self._rooms[rank]
            names = (tensors_file(rank), head_file(rank), RUN)
            for name, start, size in zip(names, room.starts, its, strict=False):
                found[name] = room.start + start, size
        return found

    def close(self) -> None:
        """Release the memory."""
        self._regions.clear()
        if self.memory is not None:
            os.close(self.memory)
            self.memory = None

    def _make_room(self) -> None:
        rank = self._comm.rank
        if self._sends:
            self._regions[rank] = _Region(self._rooms[rank])
            return
        address = ""
        if rank == 0:
            assert self.memory is not None, "it is not closed"
            # Always as long: under a virtual clock a message takes as long as it is.
            address = f"{os.getpid():010} {self.memory:010}"
            for sender in self._senders:
                self._regions[sender] = _Region(self._rooms[sender], self.memory)
        address = cast("str", self._host.broadcast_object(address))
        file = memfd.open_of_rank(FileAddress.parse(address), self._host)
        self._regions[rank] = _Region(self._rooms[rank], file)
        os.close(file)
        self._host.barrier()


class _Region:
    """The files of one rank, mapped."""

    def __init__(self, room: Room, memory: int | None = None) -> None:
        """Map a region of a file; without one, of this process's own memory."""
        self._room = room
        self._layout: list[tuple[str, torch.dtype, torch.Size]] | None = None
        self._targets: list[Tensor] = []
        if memory is None:
            self._bytes = torch.empty(room.nbytes, dtype=torch.uint8, device="cpu")
            return
        mapped = mmap.mmap(memory, room.nbytes, offset=room.start)
        with suppress(OSError):  # an older kernel gives them when they are first written
            mapped.madvise(_MADV_POPULATE_WRITE)
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)

    def files(self, sizes: Sizes) -> list[Tensor]:
        """Return the bytes of each file."""
        starts = self._room.starts
        return [self._bytes[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    @torch.no_grad()
    def copy(self, encoded: EncodedState, texts: Sequence[bytes]) -> None:
        """Overwrite the files."""
        layout = [(name, tensor.dtype, tensor.shape) for name, tensor in encoded.tensors.items()]
        if layout != self._layout:
            self._layout, self._targets = layout, self._lay_out(encoded)
        for target, tensor in zip(self._targets, encoded.tensors.values(), strict=True):
            target.copy_(tensor)
        for start, text in zip(self._room.starts[1:], texts, strict=True):
            self._write(start, text)

    def _lay_out(self, encoded: EncodedState) -> list[Tensor]:
        """Write the beginning of the file of tensors, and return places for all of them."""
        header = encoded.header()
        self._write(0, header)
        at, targets = len(header), []
        for tensor in encoded.tensors.values():
            place = self._bytes[at : at + tensor.nbytes]
            targets.append(place.view(tensor.dtype).view(tensor.shape))
            at += tensor.nbytes
        return targets

    def _write(self, start: int, text: bytes) -> None:
        self._bytes[start : start + len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)


def _round_up(size: int, to: int) -> int:
    return -(-size // to) * to
