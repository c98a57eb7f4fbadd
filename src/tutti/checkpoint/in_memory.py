"""Checkpoints in memory that outlives the ranks, taken often: what ranks go on from when one of them is lost.

rank 0    │ copy 1 │ train ... │ copy 2 │ train ...  ✝
rank 1    │ copy 1 │ train ... │ copy 2 │ train ...     ──▶ new ranks go on from copy 2

The memory is on the host of rank 0. Ranks of other hosts send their states there, and get them from there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import cast

from safetensors.torch import load
from torch import Tensor
from typing_extensions import override

from tutti.checkpoint.encoding import encode
from tutti.checkpoint.memory_files import MemoryPlace
from tutti.checkpoint.reading import Checkpoint, CheckpointFiles
from tutti.checkpoint.sharing import receive_file, send_file
from tutti.checkpoint.snapshot import MemorySnapshot, Sizes
from tutti.comm.base import Communicator
from tutti.comm.shm import memfd
from tutti.comm.shm.memfd import FileAddress
from tutti.records.checkpoints import Manifest
from tutti.records.json_lines import Json, to_json
from tutti.state import State


class MemorySaver:
    """The writer of checkpoints in memory. All ranks make one, and call its methods together.

    Args:
        comm: the ranks whose states belong together.
        place: of the memory, on the host of rank 0.
    """

    def __init__(self, comm: Communicator, place: MemoryPlace) -> None:
        self._comm, self._place = comm, place
        ranks = range(comm.size)
        firsts = comm.all_gather_objects(comm.node.broadcast_object(comm.rank))
        senders = [rank for rank in ranks if firsts[rank] != 0]
        self._copies = [MemorySnapshot(comm, comm.node, ranks, senders, copy) for copy in place.copies]
        whole = place.whole if comm.rank == 0 else 0
        self._number = 2 if comm.broadcast_object(whole) == 1 else 1

    def save(self, step: int, state: State, facts: Json) -> None:
        """Copy the state of all ranks (collective).

        Args:
            step: how many steps were done.
            state: of this rank.
            facts: of the run, JSON values; rank 0's count.
        """
        rank = self._comm.rank
        encoded = encode(state, rank)
        texts = [encoded.head, *([to_json(facts).encode(errors="surrogatepass")] if rank == 0 else [])]
        told = self._comm.all_gather_objects((encoded.file_size, *map(len, texts)))
        sizes = dict(enumerate(cast("list[Sizes]", told)))
        copy = self._copies[self._number - 1]
        copy.take(encoded, texts, sizes)
        if rank == 0:
            files = copy.places(sizes)
            self._place.publish(self._number, {"step": step, "ranks": self._comm.size, "files": files})
        self._number = 3 - self._number

    def close(self) -> None:
        """Give the mappings back; the memory stays."""
        for copy in self._copies:
            copy.close()


class _MemoryFiles(CheckpointFiles):
    """The files of a copy.

    Args:
        memory: that has them.
        files: the offset and the size of each, by name.
    """

    def __init__(self, memory: FileAddress, files: dict[str, list[int]]) -> None:
        self._memory, self._files = memory, files

    @property
    @override
    def path(self) -> Path:
        return Path("memory")

    @override
    def read(self, name: str) -> bytes:
        offset, size = self._files[name]
        with os.fdopen(self._memory.open(), "rb") as memory:
            memory.seek(offset)
            return memory.read(size)

    @override
    def tensors(self, name: str) -> dict[str, Tensor]:
        return load(self.read(name))


def kept_in(comm: Communicator, place: MemoryPlace) -> Checkpoint | None:
    """Return the last checkpoint in memory (collective); None: there is none yet.

    Args:
        comm: all ranks.
        place: of the memory, on the host of rank 0.
    """
    mine = place.described()[:1] if comm.rank == 0 else []
    described = cast("list[tuple[int, Json]]", comm.broadcast_object(mine))
    if not described:
        return None
    [(number, found)] = described
    files, memory = found["files"], place.copies[number - 1]
    manifest = Manifest(found["step"], found["ranks"], {})
    first = cast("int", comm.node.broadcast_object(comm.rank))
    others = sorted({*cast("list[int]", comm.all_gather_objects(first))} - {0})
    size = max(offset + length for offset, length in files.values())
    if first == 0:
        if comm.rank == 0 and others:
            with os.fdopen(memory.open(), "rb") as file:
                send_file(comm, file, size, others)
        return Checkpoint(_MemoryFiles(memory, files), manifest)
    received = memfd.make_for_all("received", comm.node)
    try:
        if comm.rank == first:
            with open(received, "wb", closefd=False) as file:
                receive_file(comm, file, size)
        comm.node.barrier()
        checkpoint = Checkpoint(_MemoryFiles(FileAddress.of(received), files), manifest)
        checkpoint.map()
        return checkpoint
    finally:
        os.close(received)
