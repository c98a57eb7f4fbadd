"""Existing checkpoints: found, verified to the last byte, and read by any number of ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import BinaryIO, Final, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load, load_file
from torch import Tensor
from typing_extensions import override

from tutti.checkpoint.encoding import decode
from tutti.checkpoint.memory_files import MemoryPlace, StateCopy
from tutti.checkpoint.snapshot import Places
from tutti.comm.base import Communicator
from tutti.comm.shm import memfd
from tutti.comm.shm.memfd import FileAddress
from tutti.errors import BadCheckpoint
from tutti.records import checkpoints
from tutti.records.checkpoints import RUN, Manifest, head_file, read_manifest, tensors_file
from tutti.records.json_lines import Json
from tutti.state import LocalState, Named, Saved, State, TensorPiece, joined, named

_TAG: Final = 0x7C4C
"""The tag of the messages with files."""

_CHUNK: Final = 16 << 20


class Checkpoint:
    """A checkpoint whose files are as they were written. Made by `open_checkpoint` and `newest`."""

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self.step, self.ranks, self.score = manifest.step, manifest.ranks, manifest.score

    def read(self, name: str) -> bytes:
        """Return the content of a file."""
        return (self.path / name).read_bytes()

    def tensors(self, name: str) -> dict[str, Tensor]:
        """Return the tensors of a safetensors file; the file does not change with them."""
        return load_file(self.path / name)

    @cached_property
    def facts(self) -> Json:
        """Facts about the run that rank 0 has left."""
        return self._read(RUN)

    def saved(self, rank: int, ranks: int) -> Saved:
        """Return the state from which a rank continues.

        Tensors that one rank has saved whole are mapped from its file, privately. The others are put together
        on each access, and not kept: all ranks of a host may resume at the same time.
        """
        same = ranks == self.ranks
        alone = named([self._states[rank].alone]) if same else None
        joint = [state.joint for state in self._states]
        numbers = named(LocalState(numbers=held.numbers) for held in joint).numbers
        tensors = _Joined(piece for held in joint for piece in held.pieces)
        own = self._states[rank].own if same else None
        return Saved(Named(tensors, numbers), alone, self._states[0].shared, own)

    def load(self) -> None:
        """Read all of it: from now on its files may disappear."""
        _ = self._states, self.facts

    @cached_property
    def _states(self) -> list[State]:
        """The state that each rank has left."""
        return [self._state(rank) for rank in range(self.ranks)]

    def _state(self, rank: int) -> State:
        with self._reading(tensors_file(rank)):
            head = self._read(head_file(rank))
            return decode(head, self.tensors(tensors_file(rank)))

    def _read(self, name: str) -> Json:
        with self._reading(name):
            values = json.loads(self.read(name))
            if not isinstance(values, dict):
                raise TypeError("it is no JSON object")
            return cast("Json", values)

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Turn errors about a file into one with a remedy."""
        try:
            yield
        except OSError as error:
            raise BadCheckpoint(f"cannot read {self.path / name}: {error.strerror or error}") from error
        except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise BadCheckpoint(
                f"{self.path / name} is not what tutti writes ({type(error).__name__}: {error}); resume from "
                "another checkpoint"
            ) from error


class _Joined(Mapping[str, Tensor]):
    """Whole tensors, each of pieces from several ranks."""

    def __init__(self, pieces: Iterable[TensorPiece]) -> None:
        self._pieces: dict[str, list[TensorPiece]] = {}
        for piece in pieces:
            self._pieces.setdefault(piece.name, []).append(piece)

    @override
    def __getitem__(self, name: str) -> Tensor:
        return joined(self._pieces[name])[name]

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._pieces)

    @override
    def __len__(self) -> int:
        return len(self._pieces)


def open_checkpoint(path: Path) -> Checkpoint:
    """Open the checkpoint in a folder."""
    path = path.resolve()
    return Checkpoint(path, checkpoints.verify(path))


def newest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Find the good checkpoint of the latest step, and the fault of each later one."""
    passed_over: list[str] = []
    for path in reversed(checkpoints.present(folder)):
        try:
            return Checkpoint(path, checkpoints.verify(path)), passed_over
        except BadCheckpoint as error:
            passed_over.append(str(error).removesuffix(checkpoints.REMEDY))
    return None, passed_over


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
    gathered = cast("list[tuple[bool, int]]", comm.all_gather_objects((sees, node.rank)))
    receivers = [rank for rank, one in enumerate(gathered) if one == (False, 0)]
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


def kept_in(comm: Communicator, place: MemoryPlace) -> Checkpoint | None:
    """Return the last checkpoint in memory (collective); None: there is none yet."""
    last = cast("StateCopy", comm.broadcast_object(place.last if comm.rank == 0 else None))
    if not last.number:
        return None
    memory, manifest = place.copies[last.number - 1], Manifest(last.step, last.ranks, {})
    sees = comm.node.broadcast_object(comm.rank) == 0

    def content() -> BinaryIO:
        return os.fdopen(memory.open(), "rb")

    return received(comm, sees, content, last.files, manifest) or MemoryCheckpoint(
        memory, last.files, manifest
    )
