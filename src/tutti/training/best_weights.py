"""The weights of the best epoch so far, in memory.

    epoch       1     2     3     4     5
    validated   0.9   0.4   0.6   ?     ?       results may come late
    kept              x           x     x       the best, and those without a result

Each rank keeps a slice of the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from tutti.comm.base import Communicator, cut
from tutti.records.run import EpochRecord
from tutti.replica import Flat, Replica, copy_all, local
from tutti.state import (
    LocalState,
    Saved,
    State,
    TensorPiece,
    Values,
    fill,
    find,
    name_of,
    pieces_of,
    whole_piece,
)
from tutti.training.evaluation import load_buffers, named_buffers
from tutti.training.module_state import ModuleState
from tutti.training.stopping import Monitor

EPOCHS: Final = "epochs"
"""The first word of the names of kept weights in a checkpoint, before the number of the epoch."""


@dataclass(frozen=True)
class KeptEpoch:
    """Copies of a model after an epoch."""

    pieces: list[TensorPiece]  # this rank's slice of the weights, and its local parts of DTensors
    buffers: dict[str, Tensor]  # by name, the same on every rank
    extra: Values  # the extra states of its modules


class BestWeights:
    """The weights of the best epoch so far, and of the epochs whose validation is not known yet."""

    def __init__(self, replica: Replica, comm: Communicator, monitor: Monitor | None) -> None:
        self._replica, self._comm, self._monitor = replica, comm, monitor
        self._module_state = ModuleState(replica.module)
        self._kept: dict[int, KeptEpoch] = {}

    def keep(self, epoch: int) -> None:
        """Copy the model after an epoch (collective)."""
        if self._monitor is None:
            return
        pieces = [replace(piece, values=piece.values.clone()) for piece in self._pieces(epoch)]
        buffers = {name: buffer.clone() for name, buffer in named_buffers(self._replica.module).items()}
        self._kept[epoch] = KeptEpoch(pieces, buffers, deepcopy(self._module_state.extra()))
        # Ranks that share weights must not train on before all have their copy.
        self._comm.barrier()

    def note(self, history: Sequence[EpochRecord]) -> None:
        """Drop the epochs that are known not to be the best."""
        best = self._best(history)
        for record in history:
            if record is not best:
                self._kept.pop(record.epoch, None)

    def restore(self, history: Sequence[EpochRecord]) -> EpochRecord | None:
        """Restore the model of the best of these epochs (collective); return it, or None without one."""
        best = self._best(history)
        if best is None:
            return None
        kept = self._kept[best.epoch]
        copy_all(
            (piece.values for piece in self._pieces(best.epoch)), (piece.values for piece in kept.pieces)
        )
        if self._comm.size > 1:
            for flat in self._replica.flats:
                self._comm.all_gather(flat.weights)
        load_buffers(self._replica.module, kept.buffers)
        self._module_state.load_extra(kept.extra)
        return best

    def state(self) -> State:
        """Return the kept epochs."""
        joint = LocalState([piece for kept in self._kept.values() for piece in kept.pieces])
        epochs = {str(epoch): [kept.buffers, kept.extra] for epoch, kept in self._kept.items()}
        return State(joint, shared={"epochs": epochs})

    def load_state(self, saved: Saved) -> None:
        """Continue with the kept epochs of an earlier run, if this one keeps any."""
        if self._monitor is not None:
            for name, (buffers, extra) in saved.shared["epochs"].items():
                self._kept[int(name)] = KeptEpoch(list(self._read(saved, int(name))), buffers, extra)

    def _best(self, history: Sequence[EpochRecord]) -> EpochRecord | None:
        known = (record for record in history if record.epoch in self._kept)
        return None if self._monitor is None else self._monitor.best(known)

    def _read(self, saved: Saved, epoch: int) -> Iterator[TensorPiece]:
        for flat in self._replica.flats:
            vector, mine = torch.zeros_like(flat.weights), self._mine(flat)
            fill(saved.joint.tensors, f"{EPOCHS}/{epoch}", flat, vector, mine)
            for piece in pieces_of(f"{EPOCHS}/{epoch}", flat, vector, mine):
                yield replace(piece, values=piece.values.clone())
        for name, parameter in self._replica.scattered:
            full, part = name_of(f"{EPOCHS}/{epoch}", name), local(parameter.detach())
            yield whole_piece(full, torch.empty_like(part).copy_(find(saved.joint.tensors, full, part)))

    def _pieces(self, epoch: int) -> Iterator[TensorPiece]:
        """Yield this rank's pieces of the weights, with their names in a checkpoint."""
        for flat in self._replica.flats:
            yield from pieces_of(f"{EPOCHS}/{epoch}", flat, flat.weights, self._mine(flat))
        for name, parameter in self._replica.scattered:
            yield whole_piece(name_of(f"{EPOCHS}/{epoch}", name), local(parameter.detach()))

    def _mine(self, flat: Flat) -> slice:
        return cut(len(flat.weights), self._comm.size)[self._comm.rank]
