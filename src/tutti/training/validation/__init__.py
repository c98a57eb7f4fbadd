"""The ways to evaluate the validation part after every epoch.

pause         │ epoch 1 │ evaluate 1, all ranks │ epoch 2 │ evaluate 2, all ranks │
background    │ epoch 1 │ epoch 2 │ epoch 3 │                                       beside training
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

from tutti import parts
from tutti.comm.base import Communicator
from tutti.data.parts import Part
from tutti.records.json_lines import parse_record, to_json
from tutti.records.run import Evaluation
from tutti.registry import Registry
from tutti.replica import Replica
from tutti.state import Saved, State
from tutti.training.evaluation import Objective

VALIDATIONS: Final[Registry[type[Validation]]] = parts.VALIDATIONS
"""The ways by name."""


@dataclass(frozen=True)
class ValidationTask:
    """The arguments of `tutti.training.evaluation.evaluate`."""

    replica: Replica
    part: Part
    comm: Communicator
    objective: Objective


@dataclass(frozen=True)
class ValidationPlan:
    """The part that is evaluated after every epoch, and a name in `VALIDATIONS`."""

    part: Part
    how: str = "pause"


class Validation(ABC):
    """A way to evaluate after every epoch. All ranks make the same calls."""

    def __init__(self, task: ValidationTask) -> None:
        self._task = task
        self._found: list[Evaluation] = []

    @abstractmethod
    def begin(self) -> None:
        """Evaluate the weights and buffers of the replica; they may change when this returns."""

    def collect(self, everything: bool) -> list[Evaluation]:
        """Return the new results, or wait for all, in the order of `begin` (collective)."""
        self._add_up(everything)
        found, self._found = self._found, []
        return found

    def state(self) -> State:
        """Return the results that are not collected yet (collective)."""
        self._add_up(everything=True)
        return State(shared={"waiting": [to_json(found) for found in self._found]})

    def load_state(self, saved: Saved) -> None:
        """Go on with the results that an earlier run has not collected."""
        self._found += [parse_record(left, Evaluation) for left in saved.shared.get("waiting", [])]

    @abstractmethod
    def _add_up(self, everything: bool) -> None:
        """Add up the results that the ranks have, or all, into `_found` (collective)."""

    def close(self) -> None:
        """Release processes and memory."""
        return
