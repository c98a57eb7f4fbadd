"""`--validate pause`: all ranks evaluate, and then train on."""

from __future__ import annotations

from typing_extensions import override

from tutti.records.run import Evaluation
from tutti.registry import part
from tutti.training.evaluation import Tally
from tutti.training.validation import Validation, ValidationTask


@part("pause")
class Pause(Validation):
    """All ranks stop, evaluate their shares, and go on when the result is known to all."""

    def __init__(self, task: ValidationTask) -> None:
        super().__init__(task)
        self._tally: Tally | None = None

    @override
    def begin(self) -> None:
        self._tally = self._task.tally()

    @override
    def collect(self, everything: bool) -> list[Evaluation]:
        found = self._collect_found()
        return found if self._tally is None else [*found, self._tally.total(self._task.comm)]
