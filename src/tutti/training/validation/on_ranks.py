"""Validation by the ranks that train."""

from __future__ import annotations

from typing_extensions import override

from tutti.registry import part
from tutti.training.evaluation import Tally, evaluate
from tutti.training.validation import Validation, ValidationTask


@part("pause")
class Pause(Validation):
    """All ranks stop, evaluate their shares, and go on with the result."""

    def __init__(self, task: ValidationTask) -> None:
        super().__init__(task)
        self._newest: Tally | None = None

    @override
    def begin(self) -> None:
        task = self._task
        self._newest = evaluate(task.replica.module, task.part, task.comm, task.objective)

    @override
    def _add_up(self, everything: bool) -> None:
        if self._newest is not None:
            self._found.append(self._newest.total(self._task.comm))
            self._newest = None


@part("distributed")
class Distributed(Pause):
    """Each rank evaluates its share and trains on at once; shares are added up when the ranks meet again."""

    meets = False

    @override
    def begin(self) -> None:
        """Add up the earlier shares, as all ranks are here; then evaluate this rank's share of a copy."""
        super()._add_up(everything=True)
        replica = self._task.replica
        copies = [flat.weights.clone() for flat in replica.flats]
        # Ranks that share weights or a centre must not train on before all have their copy.
        self._task.comm.barrier()
        replica.look_at(copies)
        try:
            super().begin()
        finally:
            replica.look_at(flat.weights for flat in replica.flats)

    @override
    def _add_up(self, everything: bool) -> None:
        # Other ranks may still evaluate the newest.
        if everything:
            super()._add_up(everything)
