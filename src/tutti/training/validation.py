"""The ways to evaluate the validation part: at once by all ranks, by each rank alone, or in the background.

pause         │ epoch 1 │ evaluate 1, all ranks │ epoch 2 │ evaluate 2, all ranks │
distributed   │ epoch 1 │ own share of 1 │ epoch 2 │ own share of 2 │               no rank waits
background    │ epoch 1 │ epoch 2 │ epoch 3 │                                       beside training
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Final, cast

from torch import nn

from tutti.comm.base import Communicator, cut
from tutti.data.parts import Part
from tutti.errors import BadOption, UnknownName
from tutti.records.run import Evaluation
from tutti.replica import Replica
from tutti.training.background import BackgroundEvaluator
from tutti.training.evaluation import Objective, Tally, evaluate


@dataclass(frozen=True)
class ValidationTask:
    """The arguments of an evaluation: see `tutti.training.evaluation.evaluate`."""

    replica: Replica
    part: Part
    comm: Communicator
    objective: Objective

    def tally(self) -> Tally:
        """The sums of the module over this rank's share of the samples."""
        return evaluate(self.replica.module, self.part, self.comm, self.objective)


@dataclass(frozen=True)
class ShareEvaluation:
    """The evaluation of a module on one rank's share of the samples; other processes can be sent it."""

    module: nn.Module
    share: Part
    objective: Objective

    @classmethod
    def of(cls, task: ValidationTask) -> ShareEvaluation:
        """The part of a task that is this rank's."""
        mine = cut(len(task.part), task.comm.size)[task.comm.rank]
        share = replace(task.part, inputs=task.part.inputs[mine], targets=task.part.targets[mine])
        return cls(task.replica.module, share, task.objective)

    def __call__(self) -> Tally:
        """The sums over the share."""
        return evaluate(self.module, self.share, _ALONE, self.objective)

    def __getstate__(self) -> dict[str, object]:
        # A view would be pickled with all that it is a view of.
        share = replace(self.share, inputs=self.share.inputs.clone(), targets=self.share.targets.clone())
        return {**vars(self), "share": share}


_ALONE: Final = cast("Communicator", SimpleNamespace(rank=0, size=1))
"""The ranks among which a share is divided once more: one. Nothing is exchanged."""


@dataclass(frozen=True)
class ValidationPlan:
    """The validation of a run.

    Attributes:
        part: evaluated after every epoch.
        how: when and by whom: a name in `VALIDATIONS`.
    """

    part: Part
    how: str = "pause"


class Validation(ABC):
    """A way to evaluate after every epoch. All ranks make the same calls.

    Args:
        task: what to evaluate.

    Attributes:
        meets: whether the ranks have waited for each other when `collect` returns.
    """

    meets: bool = True

    def __init__(self, task: ValidationTask) -> None:
        self._task = task

    @abstractmethod
    def begin(self) -> None:
        """Evaluate the weights and buffers that the replica holds now; they may change when this returns."""

    @abstractmethod
    def collect(self, everything: bool) -> list[Evaluation]:
        """The results that have come since the last call, in the order of `begin` (collective).

        Args:
            everything: wait for all.
        """

    def close(self) -> None:
        """Give back what this holds, whatever the state of training."""
        return


class Pause(Validation):
    """All ranks stop, evaluate their shares, and go on when the result is known to all."""

    def __init__(self, task: ValidationTask) -> None:
        super().__init__(task)
        self._tally: Tally | None = None

    def begin(self) -> None:
        """Evaluate this rank's share."""
        self._tally = self._task.tally()

    def collect(self, everything: bool) -> list[Evaluation]:
        """The result."""
        return [] if self._tally is None else [self._tally.total(self._task.comm)]


class Distributed(Validation):
    """Each rank evaluates its share and trains on at once; shares are added up when the ranks meet again."""

    meets = False

    def __init__(self, task: ValidationTask) -> None:
        super().__init__(task)
        self._newest: Tally | None = None
        self._found: list[Evaluation] = []

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

    def collect(self, everything: bool) -> list[Evaluation]:
        """All results but the newest, for which others may still be at work."""
        if everything:
            self._add_up()
        found, self._found = self._found, []
        return found

    def _add_up(self) -> None:
        if self._newest is not None:
            self._found.append(self._newest.total(self._task.comm))
            self._newest = None


class Background(Validation):
    """A process beside each rank evaluates its share of a snapshot, on time that training leaves.

    What is left at the end the ranks evaluate themselves.

    Raises:
        BadOption: the model is not in the CPU's memory.
    """

    def __init__(self, task: ValidationTask) -> None:
        super().__init__(task)
        device = task.objective.arithmetic.device
        if device != "cpu":
            raise BadOption(
                f"--validate background evaluates on the CPU, but the model lies on {device}; "
                "use --validate pause"
            )
        self._evaluator = BackgroundEvaluator(task.replica, ShareEvaluation.of(task))

    def begin(self) -> None:
        """Take a snapshot."""
        self._evaluator.snapshot()

    def collect(self, everything: bool) -> list[Evaluation]:
        """The results that are ready on all ranks; or all."""
        task, evaluator = self._task, self._evaluator
        if everything:
            evaluator.finish()
        ready = min(cast("list[int]", task.comm.all_gather_objects(evaluator.poll())))
        found, objective = [], task.objective
        for _ in range(ready):
            tally = Tally(objective.metrics, objective.classes, objective.loss.ignored)
            tally.take_in(*evaluator.take())
            found.append(tally.total(task.comm))
        return found

    def close(self) -> None:
        """End the process beside this rank."""
        self._evaluator.close()


VALIDATIONS: dict[str, type[Validation]] = {
    "pause": Pause,
    "distributed": Distributed,
    "background": Background,
}
"""The ways to evaluate, by name."""


def named_validation(name: str) -> type[Validation]:
    """The way to evaluate called `name`.

    Raises:
        UnknownName: there is none.
    """
    if name not in VALIDATIONS:
        raise UnknownName("value", name, VALIDATIONS, of="--validate")
    return VALIDATIONS[name]
