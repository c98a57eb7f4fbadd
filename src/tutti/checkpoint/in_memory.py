"""Checkpoints in memory that outlives the ranks, taken often: what ranks go on from when one of them is lost.

rank 0    │ copy 1 │ train ... │ copy 2 │ train ...  ✝
rank 1    │ copy 1 │ train ... │ copy 2 │ train ...     ──▶ new ranks go on from copy 2
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
from tutti.checkpoint.snapshot import MemorySnapshot, Sizes
from tutti.comm.base import Communicator
from tutti.records.checkpoints import RUN, Manifest, head_file, tensors_file
from tutti.records.json_lines import Json, to_json
from tutti.state import State


class MemorySaver:
    """The writer of checkpoints in memory. All ranks of a host make one, and call its methods together.

    Args:
        comm: the ranks whose states belong together.
        place: of the memory.
    """

    def __init__(self, comm: Communicator, place: MemoryPlace) -> None:
        self._comm, self._place = comm, place
        ranks = range(comm.size)
        self._copies = [MemorySnapshot(comm, comm.node, ranks, (), copy) for copy in place.copies]
        # All have the same number: nobody changes it before all have come to `save`.
        self._number = 2 if place.whole == 1 else 1

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
            files = {
                name: [offset, size]
                for other in sizes
                for name, offset, size in zip(
                    (tensors_file(other), head_file(other), RUN),
                    copy.offsets(other),
                    sizes[other],
                    strict=False,
                )
            }
            self._place.publish(self._number, {"step": step, "ranks": self._comm.size, "files": files})
        self._number = 3 - self._number

    def close(self) -> None:
        """Give the mappings back; the memory stays."""
        for copy in self._copies:
            copy.close()


class _MemoryFiles(CheckpointFiles):
    """The files of a copy.

    Args:
        place: of the memory.
        number: of the copy.
        files: where each begins, and its size, by name.
    """

    def __init__(self, place: MemoryPlace, number: int, files: dict[str, list[int]]) -> None:
        self._place, self._number, self._files = place, number, files

    @property
    @override
    def path(self) -> Path:
        return Path("memory")

    @override
    def read(self, name: str) -> bytes:
        offset, size = self._files[name]
        memory = self._place.copies[self._number - 1].open()
        try:
            return os.pread(memory, size, offset)
        finally:
            os.close(memory)

    @override
    def tensors(self, name: str) -> dict[str, Tensor]:
        return load(self.read(name))


def kept_in(place: MemoryPlace) -> Checkpoint | None:
    """Return the last checkpoint in memory; None: there is none yet."""
    number = place.whole
    if not number:
        return None
    found = place.files(number)
    manifest = Manifest(found["step"], found["ranks"], {})
    return Checkpoint(_MemoryFiles(place, number, found["files"]), manifest)
