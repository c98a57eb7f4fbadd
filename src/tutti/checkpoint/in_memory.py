"""Checkpoints in memory that outlives the ranks, taken often: what ranks go on from when one of them is lost.

rank 0    │ copy 1 │ train ... │ copy 2 │ train ...  ✝
rank 1    │ copy 1 │ train ... │ copy 2 │ train ...     ──▶ new ranks go on from copy 2

The memory is on the host of rank 0. Ranks of other hosts send their states there, and get them from there.
"""

from __future__ import annotations

import os
from typing import BinaryIO, cast

from tutti.checkpoint.encoding import encode
from tutti.checkpoint.memory_files import MemoryPlace
from tutti.checkpoint.reading import Checkpoint, MemoryCheckpoint, received
from tutti.checkpoint.snapshot import MemorySnapshot, Sizes
from tutti.comm.base import Communicator
from tutti.records.checkpoints import Manifest
from tutti.records.json_lines import Json, to_json
from tutti.state import State


class MemorySaver:
    """The writer of checkpoints in memory. All ranks make one, and call its methods together."""

    def __init__(self, comm: Communicator, place: MemoryPlace) -> None:
        self._comm, self._place = comm, place
        self._copies = [MemorySnapshot(comm, comm.node, copy) for copy in place.copies]
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


def kept_in(comm: Communicator, place: MemoryPlace) -> Checkpoint | None:
    """Return the last checkpoint in memory (collective); None: there is none yet."""
    mine = place.described()[:1] if comm.rank == 0 else []
    described = cast("list[tuple[int, Json]]", comm.broadcast_object(mine))
    if not described:
        return None
    [(number, found)] = described
    memory, manifest = place.copies[number - 1], Manifest(found["step"], found["ranks"], {})
    sees = comm.node.broadcast_object(comm.rank) == 0

    def content() -> BinaryIO:
        return os.fdopen(memory.open(), "rb")

    return received(comm, sees, content, found["files"], manifest) or MemoryCheckpoint(
        memory, found["files"], manifest
    )
