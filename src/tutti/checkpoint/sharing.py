"""A checkpoint that rank 0 has, for the ranks of all hosts.

Hosts that do not see its folder, or the memory that it is in, get its files into their memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Final, cast

import torch
from safetensors.torch import load
from torch import Tensor
from typing_extensions import override

from tutti.checkpoint.reading import Checkpoint
from tutti.comm.base import Communicator
from tutti.comm.shm import memfd
from tutti.comm.shm.memfd import FileAddress
from tutti.errors import BadCheckpoint
from tutti.records.checkpoints import Manifest, read_manifest

_TAG: Final = 0x7C4C
"""The tag of the messages with files."""

_CHUNK: Final = 16 << 20

Places = dict[str, tuple[int, int]]
"""The offset and the size of each file of a checkpoint, by name."""


class MemoryCheckpoint(Checkpoint):
    """A checkpoint whose files lie in memory, one after the other."""

    def __init__(self, memory: FileAddress, places: Places, manifest: Manifest) -> None:
        super().__init__(Path("memory"), manifest)
        self._memory, self._places = memory, places

    @override
    def read(self, name: str) -> bytes:
        offset, size = self._places[name]
        with os.fdopen(self._memory.open(), "rb") as memory:
            memory.seek(offset)
            return memory.read(size)

    @override
    def tensors(self, name: str) -> dict[str, Tensor]:
        return load(self.read(name))


def for_all(comm: Communicator, checkpoint: Checkpoint | None) -> Checkpoint:
    """Give all ranks the checkpoint that rank 0 has opened (collective)."""
    mine = None if checkpoint is None else (checkpoint.path, checkpoint.manifest)
    path, manifest = cast("tuple[Path, Manifest]", comm.broadcast_object(mine))
    sees = cast("bool", comm.node.broadcast_object(_sees(path, manifest)))
    sizes = [entry.size for entry in manifest.files.values()]
    starts = accumulate(sizes, initial=0)
    places = dict(zip(manifest.files, zip(starts, sizes, strict=False), strict=True))

    def content() -> BinaryIO:
        return BytesIO(b"".join((path / name).read_bytes() for name in places))

    return received(comm, sees, content, places, manifest) or Checkpoint(path, manifest)


def _sees(path: Path, manifest: Manifest) -> bool:
    """Return whether this host has the same checkpoint under its path."""
    try:
        return read_manifest(path) == manifest
    except BadCheckpoint:
        return False


def received(
    comm: Communicator, sees: bool, content: Callable[[], BinaryIO], places: Places, manifest: Manifest
) -> Checkpoint | None:
    """Send the files of a checkpoint from rank 0 to the hosts that do not see them (collective)."""
    node = comm.node
    found = cast("list[tuple[bool, int]]", comm.all_gather_objects((sees, node.rank)))
    receivers = [rank for rank, one in enumerate(found) if one == (False, 0)]
    size = max(start + length for start, length in places.values())
    if comm.rank == 0 and receivers:
        with content() as file:
            for start in range(0, size, _CHUNK):
                part = torch.frombuffer(bytearray(file.read(min(_CHUNK, size - start))), dtype=torch.uint8)
                for receiver in receivers:
                    comm.send(part, receiver, _TAG)
    if sees:
        return None
    memory = memfd.make_for_all("received", node)
    try:
        if node.rank == 0:
            with open(memory, "wb", closefd=False) as file:
                for start in range(0, size, _CHUNK):
                    part = torch.empty(min(_CHUNK, size - start), dtype=torch.uint8, device="cpu")
                    comm.recv(part, 0, _TAG)
                    file.write(part.numpy().data)
        node.barrier()
        checkpoint = MemoryCheckpoint(FileAddress.of(memory), places, manifest)
        checkpoint.load()
        return checkpoint
    finally:
        os.close(memory)
