"""The evaluation of the validation part after every epoch.

pause         │ epoch 1 │ evaluate 1, all ranks │ epoch 2 │ evaluate 2, all ranks │
background    │ epoch 1 │ epoch 2 │ epoch 3 │                                       beside training
"""

from __future__ import annotations

from dataclasses import dataclass

from tutti.comm.base import Communicator
from tutti.data.parts import Part
from tutti.records.json_lines import parse_record, to_json
from tutti.records.run import Evaluation
from tutti.replica import Replica
from tutti.state import Saved, State
from tutti.training.evaluation import Objective, evaluate


@dataclass(frozen=True)
class ValidationPlan:
    """The part to evaluate after every epoch, and how: "pause" or "background"."""

    part: Part
    how: str = "pause"


class Validation:
    """All ranks stop, evaluate their shares, and continue with the result. All make the same calls."""

    def __init__(self, replica: Replica, part: Part, comm: Communicator, objective: Objective) -> None:
        self._replica, self._part, self._comm, self._objective = replica, part, comm, objective
        self._found: list[Evaluation] = []

    def begin(self) -> None:
        """Evaluate the weights and buffers of the replica; they may change when this returns."""
        tally = evaluate(self._replica.module, self._part, self._comm, self._objective)
        self._found.append(tally.total(self._comm))

    def collect(self, everything: bool) -> list[Evaluation]:
        """Return the new results, or wait for all, in the order of `begin` (collective)."""
        found, self._found = self._found, []
        return found

    def state(self) -> State:
        """Return the results not collected yet (collective)."""
        return State(shared={"waiting": [to_json(found) for found in self._found]})

    def load_state(self, saved: Saved) -> None:
        """Continue with the results that an earlier run has not collected."""
        self._found += [parse_record(left, Evaluation) for left in saved.shared.get("waiting", [])]

    def close(self) -> None:
        """Release processes and memory."""
        return
