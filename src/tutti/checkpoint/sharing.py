"""A checkpoint that one rank has opened, for the ranks of all hosts, also where its folder is not seen."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO, Final, cast

import torch

from tutti.checkpoint.reading import Checkpoint
from tutti.comm.base import Communicator
from tutti.errors import BadCheckpoint
from tutti.records.checkpoints import FoundCheckpoint, compare, read_manifest

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
            with open(found.path / name, "rb") as file:
                send_file(comm, file, entry.size, receivers)
    if sees:
        return Checkpoint.at(found)
    receives = comm.rank in receivers
    with TemporaryDirectory(prefix="tutti-") if receives else nullcontext() as folder:
        path = Path(cast("str", node.broadcast_object(folder)))
        if receives:
            for name, entry in found.manifest.files.items():
                with open(path / name, "wb") as file:
                    receive_file(comm, file, entry.size)
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


def send_file(comm: Communicator, file: BinaryIO, size: int, receivers: Sequence[int]) -> None:
    """Send the first `size` bytes of a file to some ranks, which call `receive_file`."""
    for start in range(0, size, _CHUNK):
        content = torch.frombuffer(bytearray(file.read(min(_CHUNK, size - start))), dtype=torch.uint8)
        for receiver in receivers:
            comm.send(content, receiver, _TAG)


def receive_file(comm: Communicator, file: BinaryIO, size: int) -> None:
    """Write what rank 0 sends by `send_file`."""
    for start in range(0, size, _CHUNK):
        content = torch.empty(min(_CHUNK, size - start), dtype=torch.uint8, device="cpu")
        comm.recv(content, 0, _TAG)
        file.write(content.numpy().data)
