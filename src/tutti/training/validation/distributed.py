"""`--validate distributed`: no rank waits for another."""

from __future__ import annotations

from typing_extensions import override

from tutti.records.run import Evaluation
from tutti.registry import part
from tutti.state import State
from tutti.training.evaluation import Tally
from tutti.training.validation import Validation, ValidationTask


@part("distributed")
class Distributed(Validation):
    """Each rank evaluates its share and trains on at once; shares are added up when the ranks meet again."""

    meets = False

    def __init__(self, task: ValidationTask) -> None:
        super().__init__(task)
        self._newest: Tally | None = None

    @override
    def begin(self) -> None:
        """Add up the earlier shares, as all ranks are here; then evaluate this rank's share of a copy."""
        self._add_up()
        replica = self._task.replica
        copies = [flat.weights.clone() for flat in replica.flats]
        # Ranks that see the same weights, or the same centre, must not train on before all have their copy.
        self._task.comm.barrier()
        replica.look_at(copies)
        try:
            self._newest = self._task.tally()
        finally:
            replica.look_at(flat.weights for flat in replica.flats)

    @override
    def collect(self, everything: bool) -> list[Evaluation]:
        """All results but the newest, for which others may still be at work."""
        if everything:
            self._add_up()
        return self._collect_found()

    @override
    def state(self) -> State:
        self._add_up()
        return super().state()

    def _add_up(self) -> None:
        if self._newest is not None:
            self._found.append(self._newest.total(self._task.comm))
            self._newest = None
