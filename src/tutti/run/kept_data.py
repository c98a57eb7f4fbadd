"""The data set of a run in memory that outlives its ranks: those that come after them find it there.

    table │ where the description begins │ its length
    arena │ table │ samples │ targets │ ... │ description: the data set, with places instead of tensors

The first rank of those that come first has the lock on the table while they read; the kernel frees it if that
rank dies. They read as ever, only into this memory instead of their own.
"""

from __future__ import annotations

import io
import pickle
import random
from contextlib import ExitStack, closing
from typing import Any, Final, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from tutti.checkpoint.memory_files import TABLE_BYTES
from tutti.comm.base import Communicator
from tutti.comm.shm.arena import FIRST, Arena
from tutti.comm.shm.communicator import HostCommunicator
from tutti.comm.shm.memfd import FileAddress
from tutti.data import DataSet
from tutti.data.streaming import StreamedPart
from tutti.run.build import free_given_data, open_config_data
from tutti.run.train_job import TrainJob

TABLE: Final = FIRST
"""The offset of the table, which is allocated first."""


class _Place(NamedTuple):
    """A tensor in the arena."""

    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Noting(HostCommunicator):
    """A communicator that notes where in the arena it has allocated what ranks share."""

    offsets: dict[int, int]

    @override
    def shared(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        offset, tensor = self.placed(*shape, dtype=dtype)
        self.offsets[tensor.untyped_storage().data_ptr()] = offset
        return tensor


class KeptData:
    """The data set that is kept.

    Args:
        address: of its arena.
    """

    def __init__(self, address: FileAddress) -> None:
        self._arena = Arena.open(address)
        self._table = self._arena.words(TABLE, TABLE_BYTES // 8)

    def open(self, job: TrainJob, comm: Communicator) -> DataSet:
        """Open the data set of a run (collective), as `open_config_data` does; it is read if it is not there.

        Then the memory is taken from the ranks before these, which must be gone.

        Raises:
            UserError: the data or the split cannot be used.
        """
        assert isinstance(comm, HostCommunicator), "lost ranks are replaced on one host"
        with ExitStack() as stack:
            if comm.rank == 0:
                stack.enter_context(self._arena.lock(TABLE))
            place = cast("tuple[int, int]", comm.broadcast_object(tuple(self._table)))
            if place[1]:
                return self._found(comm, *place)
            return self._read(job, comm)

    def _found(self, comm: Communicator, offset: int, length: int) -> DataSet:
        """Return what lies there already; rank 0 draws no numbers that it would have drawn to read it."""
        content = self._arena.tensor(offset, (length,), torch.uint8).numpy().tobytes()
        data, numbers = cast("tuple[DataSet, _Numbers]", _Reading(self._arena, content).load())
        if comm.rank == 0:
            numbers.restore()
        return data

    def _read(self, job: TrainJob, comm: HostCommunicator) -> DataSet:
        if comm.rank == 0:
            self._arena.release_all()  # what ranks that have died over it left there
        with closing(comm.over(self._arena, _Noting)) as noting:
            noting.offsets = {}
            data = open_config_data(job, noting)
            if comm.rank == 0 and not any(isinstance(part, StreamedPart) for part in data.parts):
                self._keep(data, noting.offsets)
                free_given_data(job, comm)
            noting.barrier()
        return data

    def _keep(self, data: DataSet, offsets: dict[int, int]) -> None:
        file = io.BytesIO()
        _Describing(file, offsets).dump((data, _Numbers.now()))
        content = np.frombuffer(file.getvalue(), np.uint8)
        offset = self._arena.allocate(len(content))
        self._arena.tensor(offset, (len(content),), torch.uint8).numpy()[:] = content
        self._table[0] = offset
        self._table[1] = len(content)  # last: from here on it is there


class _Numbers(NamedTuple):
    """The states of the random generators of a process."""

    python: tuple[object, ...]
    numpy: dict[str, Any]
    torch: Tensor

    @classmethod
    def now(cls) -> _Numbers:
        return cls(random.getstate(), np.random.get_state(legacy=False), torch.get_rng_state())

    def restore(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)


class _Describing(pickle.Pickler):
    """Writes the places of tensors in the arena, and other tensors as they are.

    Args:
        file: to write to.
        offsets: in the arena, by the address of a storage.
    """

    def __init__(self, file: io.BytesIO, offsets: dict[int, int]) -> None:
        super().__init__(file)
        self._offsets = offsets

    @override
    def persistent_id(self, obj: object) -> _Place | None:
        if not isinstance(obj, Tensor):
            return None
        offset = self._offsets.get(obj.untyped_storage().data_ptr()) if obj.numel() else None
        if offset is None:
            return None
        begin = offset + int(obj.storage_offset()) * obj.element_size()
        return _Place(begin, tuple(obj.shape), obj.stride(), obj.dtype)


class _Reading(pickle.Unpickler):
    """Reads what `_Describing` has written; tensors that were one are one again."""

    def __init__(self, arena: Arena, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self._arena = arena
        self._seen: dict[_Place, Tensor] = {}

    @override
    def persistent_load(self, pid: _Place) -> Tensor:
        if pid not in self._seen:
            span = 1 + sum((size - 1) * stride for size, stride in zip(pid.shape, pid.stride, strict=True))
            memory = self._arena.tensor(pid.offset, (span,), pid.dtype)
            self._seen[pid] = memory.as_strided(pid.shape, pid.stride)
        return self._seen[pid]
