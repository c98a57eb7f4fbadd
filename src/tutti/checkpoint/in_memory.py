"""Checkpoints in memory that outlives the ranks, taken often: what ranks go on from when one of them is lost.

rank 0    │ copy 1 │ train ... │ copy 2 │ train ...  ✝
rank 1    │ copy 1 │ train ... │ copy 2 │ train ...     ──▶ new ranks go on from copy 2

The memory is on the host of rank 0. Ranks of other hosts send their states there, and get them from there.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Final, cast

import torch
from safetensors.torch import load
from torch import Tensor
from typing_extensions import override

from tutti.checkpoint.encoding import encode
from tutti.checkpoint.memory_files import MemoryPlace
from tutti.checkpoint.reading import Checkpoint, CheckpointFiles
from tutti.checkpoint.snapshot import MemorySnapshot, Sizes
from tutti.checksum import checksum
from tutti.comm.base import Communicator
from tutti.comm.shm import memfd
from tutti.comm.shm.memfd import FileAddress
from tutti.errors import BadCheckpoint
from tutti.records.checkpoints import RUN, Manifest, head_file, tensors_file
from tutti.records.json_lines import Json, to_json
from tutti.state import State
from tutti.terminal import warn_on_stderr


class MemorySaver:
    """The writer of checkpoints in memory. All ranks make one, and call its methods together.

    Args:
        comm: the ranks whose states belong together.
        place: of the memory, on the host of rank 0.
    """

    def __init__(self, comm: Communicator, place: MemoryPlace) -> None:
        self._comm, self._place = comm, place
        ranks = range(comm.size)
        # Not all that see the memory share an arena with rank 0: one machine may have several hosts' names.
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
        sums = self._comm.all_gather_objects([checksum(file) for file in copy.files(sizes[rank])])
        if rank == 0:
            files = {
                name: place
                for other in sizes
                for name, *place in zip(
                    (tensors_file(other), head_file(other), RUN),
                    copy.offsets(other),
                    sizes[other],
                    cast("list[int]", sums[other]),
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
        memory: that has them.
        files: where each begins, its size, and its checksum, by name.
    """

    def __init__(self, memory: FileAddress, files: dict[str, list[int]]) -> None:
        self._memory, self._files = memory, files

    @property
    @override
    def path(self) -> Path:
        return Path("memory")

    @override
    def read(self, name: str) -> bytes:
        offset, size, _ = self._files[name]
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
    here = comm.hosts == 1 or place.is_here()
    mine = (place.described(), place.damaged()) if comm.rank == 0 else ([], [])
    told, damaged = cast("tuple[list[tuple[int, Json]], list[int]]", comm.broadcast_object(mine))
    if damaged and comm.rank == 0:
        warn_on_stderr("the description of a copy of the state in memory is damaged")
    if damaged and not told:
        raise _no_copy()
    if not told:
        return None
    number, found = _sound(comm, place, told, here)
    files, memory = found["files"], place.copies[number - 1]
    manifest = Manifest(found["step"], found["ranks"], {})
    if comm.hosts == 1:
        return Checkpoint(_MemoryFiles(memory, files), manifest)
    seen = comm.all_gather_objects((here, comm.node.rank))
    receivers = [rank for rank, one in enumerate(seen) if one == (False, 0)]
    size = _end_of(files)
    if here:
        if comm.rank == 0:
            _send(comm, memory, size, receivers)
        return Checkpoint(_MemoryFiles(memory, files), manifest)
    received = memfd.make_for_all("received", comm.node)
    try:
        if comm.rank in receivers:
            _receive(comm, received, size)
        comm.node.barrier()
        checkpoint = Checkpoint(_MemoryFiles(FileAddress.of(received), files), manifest)
        checkpoint.map()
        return checkpoint
    finally:
        os.close(received)


def _sound(
    comm: Communicator, place: MemoryPlace, described: Sequence[tuple[int, Json]], here: bool
) -> tuple[int, Json]:
    """The first of some copies whose files are as they were written (collective); the others are forgotten.

    Args:
        comm: all ranks.
        place: of the memory.
        described: the copies.
        here: whether the memory is on this host.

    Raises:
        BadCheckpoint: there is none.
    """
    passed_over: list[int] = []
    for number, found in described:
        files = list(found["files"].items())[comm.node.rank :: comm.node.size] if here else []
        damaged = _damaged(place.copies[number - 1], dict(files)) if files else []
        if not (names := sorted({*chain(*cast("list[list[str]]", comm.all_gather_objects(damaged)))})):
            for one in passed_over if comm.rank == 0 else []:
                place.forget(one)
            return number, found
        passed_over.append(number)
        if comm.rank == 0:
            step = f"{found['step']:,}"
            warn_on_stderr(
                f"the copy in memory of the state after step {step} is damaged ({', '.join(names)})"
            )
    raise _no_copy()


def _no_copy() -> BadCheckpoint:
    return BadCheckpoint(
        "no copy of the state in memory is as it was written; go on from the newest checkpoint of the run: "
        "--resume FOLDER"
    )


def _damaged(memory: FileAddress, files: dict[str, list[int]]) -> list[str]:
    """The names of files that are not as they were written."""
    with os.fdopen(memory.open(), "rb") as file:
        content = torch.frombuffer(
            mmap.mmap(file.fileno(), _end_of(files), access=mmap.ACCESS_COPY), dtype=torch.uint8
        )
    return [
        name for name, (start, size, sum_) in files.items() if checksum(content[start : start + size]) != sum_
    ]


def _end_of(files: dict[str, list[int]]) -> int:
    return max(start + size for start, size, _ in files.values())


def _send(comm: Communicator, memory: FileAddress, size: int, receivers: Sequence[int]) -> None:
    """Send the first bytes of the memory to ranks of other hosts."""
    with os.fdopen(memory.open(), "rb") as file:
        for start in range(0, size, _CHUNK):
            content = torch.frombuffer(bytearray(file.read(min(_CHUNK, size - start))), dtype=torch.uint8)
            for receiver in receivers:
                comm.send(content, receiver, _TAG)


def _receive(comm: Communicator, memory: int, size: int) -> None:
    """Write what rank 0 sends."""
    with open(memory, "wb", closefd=False) as file:
        for start in range(0, size, _CHUNK):
            content = torch.empty(min(_CHUNK, size - start), dtype=torch.uint8, device="cpu")
            comm.recv(content, 0, _TAG)
            file.write(content.numpy().data)


_TAG: Final = 0x7C4D
"""The tag of the messages with a checkpoint."""

_CHUNK: Final = 16 << 20
