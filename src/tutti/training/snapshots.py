"""Snapshots of a model: what is kept of it, to be evaluated while training goes on."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from tutti.replica import Replica, copy_all, view_like
from tutti.state import Values
from tutti.training.evaluation import keras_statistics

_ALIGNMENT: Final = 64


class SnapshotLayout:
    """The tensors of a replica that training changes: its weights, as flat vectors, and its buffers."""

    def __init__(self, replica: Replica) -> None:
        self._replica, self.weights = replica, [flat.weights for flat in replica.flats]
        self.buffers = [
            *(buffer for buffer in dict.fromkeys(replica.module.buffers()) if buffer.numel()),
            *keras_statistics(replica.module),
        ]
        self.present = [*self.weights, *self.buffers]
        self._sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in self.present]
        self.nbytes = sum(self._sizes)

    def slots(self, memory: mmap.mmap) -> list[list[Tensor]]:
        """As many places for snapshots as `memory` has room for; none is used up before it is written."""
        return [self._slot(memory, start) for start in range(0, len(memory), self.nbytes)]

    def _slot(self, memory: mmap.mmap, start: int) -> list[Tensor]:
        slot = []
        for like, size in zip(self.present, self._sizes, strict=True):
            kept = torch.frombuffer(memory, dtype=like.dtype, count=like.numel(), offset=start)
            slot.append(kept.view(like.shape))
            start += size
        return slot

    @contextmanager
    def shown(self, snapshot: Sequence[Tensor]) -> Iterator[None]:
        """Have a snapshot in the module meanwhile."""
        own = [buffer.clone() for buffer in self.buffers]
        self.show(snapshot)
        try:
            yield
        finally:
            self.show([*self.weights, *own])

    @torch.no_grad()
    def show(self, snapshot: Sequence[Tensor]) -> None:
        """Put a snapshot into the module. Weights are only pointed to: others may see the replica's own."""
        count = len(self.weights)
        self._replica.look_at(snapshot[:count])
        copy_all(self.buffers, snapshot[count:])

    def named(self, snapshot: Sequence[Tensor]) -> Values:
        """Return a snapshot by the names of the parameters."""
        count = len(self.weights)
        parameters = self._parameters(snapshot[:count])
        return {"parameters": parameters, "buffers": list(snapshot[count:])}

    def laid(self, values: Values) -> list[Tensor]:
        """Return the snapshot that `named` gave these values of, maybe in another run."""
        snapshot = [*map(torch.zeros_like, self.weights), *values["buffers"]]
        for name, own in self._parameters(snapshot).items():
            own.copy_(values["parameters"][name])
        return snapshot

    def _parameters(self, vectors: Iterable[Tensor]) -> dict[str, Tensor]:
        return {
            name: view_like(vector[span], parameter)
            for flat, vector in zip(self._replica.flats, vectors, strict=False)
            for name, parameter, span in zip(flat.names, flat.parameters, flat.spans, strict=True)
        }
