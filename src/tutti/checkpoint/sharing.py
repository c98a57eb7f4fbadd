"""A checkpoint that one rank has opened, for the ranks of all hosts, also where its folder is not seen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, cast

import torch
from torch import Tensor

from tutti.checkpoint.reading import Checkpoint
from tutti.comm.base import Communicator
from tutti.errors import BadCheckpoint
from tutti.records.checkpoints import FileEntry, FoundCheckpoint, compare, read_manifest

_TAG: Final = 0x7C4C
"""The tag of the messages with files."""

_CHUNK: Final = 16 << 20


def for_all(comm: Communicator, checkpoint: Checkpoint | None) -> Checkpoint:
    """Give all ranks the checkpoint that rank 0 has opened (collective).

    Hosts that do not see its folder get its files through the communicator, and need room for them among
    their temporary files.

    Args:
        comm: the ranks.
        checkpoint: rank 0's.

    Returns:
        The same checkpoint, as this rank can read it.

    Raises:
        BadCheckpoint: what has arrived is not what was sent.
    """
    found = cast("FoundCheckpoint", comm.broadcast_object(checkpoint and _folder_of(checkpoint)))
    node = comm.node
    sees = cast("bool", node.broadcast_object(_sees(found)))
    told = cast("list[tuple[bool, int]]", comm.all_gather_objects((sees, node.rank)))
    receivers = [rank for rank, one in enumerate(told) if one == (False, 0)]
    if comm.rank == 0 and receivers:
        for name, entry in found.manifest.files.items():
            for vector in _chunks(found.path / name, entry):
                for receiver in receivers:
                    comm.send(vector, receiver, _TAG)
    if sees:
        return Checkpoint.at(found)
    receives = comm.rank in receivers
    with TemporaryDirectory(prefix="tutti-") if receives else nullcontext() as folder:
        path = Path(cast("str", node.broadcast_object(folder)))
        if receives:
            for name, entry in found.manifest.files.items():
                _receive(comm, path / name, entry)
            compare(path, found.manifest)
        node.barrier()
        copy = Checkpoint.at(FoundCheckpoint(path, found.manifest))
        copy.map()
        node.barrier()
    return copy


def _folder_of(checkpoint: Checkpoint) -> FoundCheckpoint:
    return FoundCheckpoint(checkpoint.path, checkpoint.manifest)


def _sees(found: FoundCheckpoint) -> bool:
    """Tell whether this host has the same checkpoint under its path."""
    try:
        return read_manifest(found.path) == found.manifest
    except BadCheckpoint:
        return False


def _chunks(path: Path, entry: FileEntry) -> Iterator[Tensor]:
    """Yield the content of a file."""
    with open(path, "rb") as file:
        for start in range(0, entry.size, _CHUNK):
            content = bytearray(file.read(min(_CHUNK, entry.size - start)))
            yield torch.frombuffer(content, dtype=torch.uint8)


def _receive(comm: Communicator, path: Path, entry: FileEntry) -> None:
    """Write a file that rank 0 sends."""
    with open(path, "wb") as file:
        for start in range(0, entry.size, _CHUNK):
            vector = torch.empty(min(_CHUNK, entry.size - start), dtype=torch.uint8, device="cpu")
            comm.recv(vector, 0, _TAG)
            file.write(vector.numpy().data)
