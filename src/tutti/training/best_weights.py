"""The weights of the best epoch so far, in memory.

    epoch       1     2     3     4     5
    validated   0.9   0.4   0.6   ?     ?       results may come late
    kept              x           x     x       the best, and all that may turn out to be better

Each rank keeps a slice of the weights that all hold together.
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
from tutti.state import Held, Saved, State, TensorPiece, Values, fill, find, name_of, pieces_of, whole_piece
from tutti.training.evaluation import load_buffers, named_buffers, untrained
from tutti.training.module_state import ModuleState
from tutti.training.stopping import Ranking

EPOCHS: Final = "epochs"
"""The first word of the names of kept weights, in a checkpoint; the number of the epoch follows."""


@dataclass(frozen=True)
class KeptEpoch:
    """Copies of what a model was after an epoch.

    Attributes:
        pieces: this rank's slice of the weights, and its parts of those that torch.distributed has divided.
        buffers: all by name, the same on every rank that holds them.
        untrained: parameters that are not trained, which a forward pass may change.
        extra: the extra states of its modules.
    """

    pieces: list[TensorPiece]
    buffers: dict[str, Tensor]
    untrained: dict[str, Tensor]
    extra: Values


class BestWeights:
    """The weights of the best epoch so far, and of those of which it is not known yet how good they are.

    Args:
        replica: the model.
        module_state: the extra states of its modules.
        comm: the ranks that hold the same weights.
        ranking: which epoch is the best.
    """

    def __init__(
        self,
        replica: Replica,
        module_state: ModuleState,
        comm: Communicator,
        ranking: Ranking,
    ) -> None:
        self._replica, self._comm, self._ranking = replica, comm, ranking
        self._kept: dict[int, KeptEpoch] = {}
        self._module_state = module_state

    def keep(self, epoch: int) -> None:
        """Copy the weights and all else that the replica has after an epoch (collective)."""
        pieces = [replace(piece, values=piece.values.clone()) for piece in self._pieces(epoch)]
        buffers = {name: buffer.clone() for name, buffer in named_buffers(self._replica.module).items()}
        fixed = {name: parameter.clone() for name, parameter in untrained(self._replica).items()}
        self._kept[epoch] = KeptEpoch(pieces, buffers, fixed, deepcopy(self._module_state.extra()))
        # Ranks that see the same weights must not train on before all have their copy.
        self._comm.barrier()

    def note(self, history: Sequence[EpochRecord]) -> None:
        """Drop what is not the best, as far as that is known after these epochs."""
        best = self._best(history)
        for record in history:
            if record is not best:
                self._kept.pop(record.epoch, None)

    def restore(self, history: Sequence[EpochRecord]) -> EpochRecord | None:
        """Give every replica the weights and all else of the best of these epochs (collective).

        Returns:
            That epoch; None where nothing is known of any: then all stays as it is.
        """
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
        with torch.no_grad():
            for name, parameter in untrained(self._replica).items():
                parameter.copy_(kept.untrained[name])
        self._module_state.load_extra(kept.extra)
        return best

    def state(self) -> State:
        """Return all that is kept."""
        joint = Held([piece for kept in self._kept.values() for piece in kept.pieces])
        buffers = {str(epoch): kept.buffers for epoch, kept in self._kept.items()}
        fixed = {str(epoch): kept.untrained for epoch, kept in self._kept.items()}
        extra = {str(epoch): kept.extra for epoch, kept in self._kept.items()}
        return State(joint, shared={"buffers": buffers, "untrained": fixed, "extra": extra})

    def load_state(self, saved: Saved) -> None:
        """Go on with what was kept."""
        for epoch, buffers in saved.shared.get("buffers", {}).items():
            fixed, extra = saved.shared["untrained"][epoch], saved.shared["extra"][epoch]
            self._kept[int(epoch)] = KeptEpoch(list(self._read(saved, int(epoch))), buffers, fixed, extra)

    def _best(self, history: Sequence[EpochRecord]) -> EpochRecord | None:
        return self._ranking.best(record for record in history if record.epoch in self._kept)

    def _read(self, saved: Saved, epoch: int) -> Iterator[TensorPiece]:
        for flat in self._replica.flats:
            vector, mine = torch.zeros_like(flat.weights), self._mine(flat)
            fill(saved.joint.tensors, prefix_of(epoch), flat, vector, mine)
            for piece in pieces_of(prefix_of(epoch), flat, vector, mine):
                yield replace(piece, values=piece.values.clone())
        for name, parameter in self._replica.scattered:
            full, part = name_of(prefix_of(epoch), name), local(parameter.detach())
            yield whole_piece(full, torch.empty_like(part).copy_(find(saved.joint.tensors, full, part)))

    def _pieces(self, epoch: int) -> Iterator[TensorPiece]:
        """The pieces of the weights that this rank keeps, under the names that they are kept by."""
        for flat in self._replica.flats:
            yield from pieces_of(prefix_of(epoch), flat, flat.weights, self._mine(flat))
        for name, parameter in self._replica.scattered:
            yield whole_piece(name_of(prefix_of(epoch), name), local(parameter.detach()))

    def _mine(self, flat: Flat) -> slice:
        return cut(len(flat.weights), self._comm.size)[self._comm.rank]


def prefix_of(epoch: int | str) -> str:
    """Return what the names of the weights of an epoch begin with."""
    return f"{EPOCHS}/{epoch}"
