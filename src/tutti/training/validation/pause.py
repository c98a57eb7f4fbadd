"""`--validate pause`: the ranks stop."""

from __future__ import annotations

from time import monotonic
from typing import Final

from typing_extensions import override

from tutti.records.run import Evaluation
from tutti.registry import part
from tutti.training.evaluation import BrokenOff, Tally, evaluate
from tutti.training.random_state import load_random_state, random_state
from tutti.training.validation import Validation, ValidationTask

PATIENCE_S: Final = 5.0
"""The seconds after which a request to stop breaks an evaluation off: a shorter one comes to its end."""


@part("pause")
class Pause(Validation):
    """All ranks stop, evaluate their shares, and go on when the result is known to all."""

    breaks_off = True

    def __init__(self, task: ValidationTask) -> None:
        super().__init__(task)
        self._tally: Tally | None = None

    @override
    def begin(self) -> None:
        task, before, random = self._task, monotonic(), random_state()
        asked = task.asked

        def breaks_off() -> bool:
            return asked is not None and monotonic() - before >= PATIENCE_S and asked()

        try:
            self._tally = evaluate(
                task.replica.module, task.part, task.comm, task.objective, breaks_off=breaks_off
            )
        except BrokenOff:
            self.broken_off = True
            load_random_state(random)  # It is made again, from its beginning.

    @override
    def collect(self, everything: bool) -> list[Evaluation]:
        found = self._collect_found()
        return found if self._tally is None else [*found, self._tally.total(self._task.comm)]
