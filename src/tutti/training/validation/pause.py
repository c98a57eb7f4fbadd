"""`--validate pause`: the ranks stop training and evaluate."""

from __future__ import annotations

from typing_extensions import override

from tutti.registry import part
from tutti.training.evaluation import evaluate
from tutti.training.validation import Validation


@part("pause")
class Pause(Validation):
    """All ranks stop, evaluate their shares, and go on with the result."""

    @override
    def begin(self) -> None:
        task = self._task
        tally = evaluate(task.replica.module, task.part, task.comm, task.objective)
        self._found.append(tally.total(task.comm))

    @override
    def _add_up(self, everything: bool) -> None:
        return
