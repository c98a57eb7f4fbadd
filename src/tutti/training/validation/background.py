"""`--validate background`: processes beside the ranks evaluate."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import cast

from torch import Tensor
from typing_extensions import override

from tutti.comm.base import Communicator, cut
from tutti.records.run import Evaluation
from tutti.registry import part
from tutti.replica import stretch_like
from tutti.training.background import BackgroundEvaluator
from tutti.training.evaluation import Tally, evaluate
from tutti.training.validation import Validation, ValidationTask


@part("background")
class Background(Validation):
    """A process beside each rank evaluates its share of a snapshot, on time that training leaves.

    What is left at the end the ranks evaluate themselves.
    """

    def __init__(self, task: ValidationTask) -> None:
        super().__init__(task)
        mine = cut(len(task.part), task.comm.size)[task.comm.rank]
        inputs, targets = (_stretch(whole, mine) for whole in (task.part.inputs, task.part.targets))
        share = replace(task.part, inputs=inputs, targets=targets)
        alone = cast("Communicator", SimpleNamespace(rank=0, size=1))
        evaluation = partial(evaluate, task.replica.module, share, alone, task.objective)
        self._evaluator = BackgroundEvaluator(task.replica, evaluation)

    @override
    def begin(self) -> None:
        self._evaluator.snapshot()

    @override
    def collect(self, everything: bool) -> list[Evaluation]:
        """The results that are ready on all ranks; or all."""
        task, evaluator = self._task, self._evaluator
        if everything:
            evaluator.finish()
        ready = min(cast("list[int]", task.comm.all_gather_objects(evaluator.poll())))
        tally = Tally(task.objective)
        return [tally.total_of(evaluator.take(), task.comm) for _ in range(ready)]

    @override
    def close(self) -> None:
        self._evaluator.close()


def _stretch(samples: Tensor, mine: slice) -> Tensor:
    """Some of the samples, a storage of their own: a view would be pickled with all that it is a view of."""
    each = samples[:1].numel()
    return stretch_like(samples.view(-1), slice(mine.start * each, mine.stop * each), samples[mine])
