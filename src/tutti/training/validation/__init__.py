"""The ways to evaluate the validation part after every epoch: one file each.

pause         │ epoch 1 │ evaluate 1, all ranks │ epoch 2 │ evaluate 2, all ranks │
distributed   │ epoch 1 │ own share of 1 │ epoch 2 │ own share of 2 │               no rank waits
background    │ epoch 1 │ epoch 2 │ epoch 3 │                                       beside training
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

from tutti.comm.base import Communicator
from tutti.data.parts import Part
from tutti.records.json_lines import parse_record, to_json
from tutti.records.run import Evaluation
from tutti.registry import Registry
from tutti.replica import Replica
from tutti.state import Saved, State
from tutti.training.evaluation import Objective, Tally, evaluate

VALIDATIONS: Final[Registry[type[Validation]]] = Registry("tutti.training.validation", "way to validate")
"""The ways by name."""


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

    Attributes:
        meets: whether the ranks have waited for each other when `collect` returns.
    """

    meets: bool = True

    def __init__(self, task: ValidationTask) -> None:
        self._task = task
        self._found: list[Evaluation] = []

    @abstractmethod
    def begin(self) -> None:
        """Evaluate the weights and buffers that the replica holds now; they may change when this returns."""

    @abstractmethod
    def collect(self, everything: bool) -> list[Evaluation]:
        """The results that have come since the last call, in the order of `begin` (collective).

        Args:
            everything: wait for all.
        """

    def state(self) -> State:
        """Return what was begun and not collected yet (collective)."""
        return State(shared={"waiting": [to_json(found) for found in self._found]})

    def load_state(self, saved: Saved) -> None:
        """Go on with what an earlier one had not handed out, whatever way it was."""
        self._found += [parse_record(left, Evaluation) for left in saved.shared.get("waiting", [])]

    def _collect_found(self) -> list[Evaluation]:
        """Return the results that are there already."""
        found, self._found = self._found, []
        return found

    def close(self) -> None:
        """Give back what this holds, whatever the state of training."""
        return
