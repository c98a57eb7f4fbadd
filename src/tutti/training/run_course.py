"""The course of a run: the part of a trainer's state that is neither model, optimizer nor batches."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from tutti.records.json_lines import parse_record, to_json
from tutti.records.run import EpochRecord, Evaluation
from tutti.state import Values
from tutti.training.evaluation import Tally


@dataclass
class OpenEpoch:
    """An unfinished epoch."""

    number: int  # from 0
    began: float  # by the trainer's clock
    tally: Tally  # of the training samples


@dataclass
class TrainingState:
    """The course of a run on one rank."""

    step: int = 0  # the updates made, by the numbers of the batches
    counted: int = 0  # further steps, with batches of other ranks, made before the run was resumed
    lr: float = math.nan  # of the last update
    history: list[EpochRecord] = field(default_factory=list)  # the epochs whose validation is known
    unvalidated: deque[EpochRecord] = field(default_factory=deque)  # later epochs
    resumed: OpenEpoch | None = None  # the epoch in which the run continues
    stopped: str | None = None  # why the run has stopped, to be resumed later
    ended: str | None = None  # why it has ended before the last update
    restored: EpochRecord | None = None  # the epoch with the final weights; None: the last
    final: Evaluation | None = None  # the final weights on the validation part

    @property
    def made(self) -> int:
        """The steps that this rank has made since the run began."""
        return self.step + self.counted

    @property
    def begun(self) -> int:
        """The epochs that are over, or will be when their validation is known."""
        return len(self.history) + len(self.unvalidated)

    @property
    def over(self) -> bool:
        """True if nothing more is trained now."""
        return self.stopped is not None or self.ended is not None

    def complete(self, evaluations: Sequence[Evaluation | None]) -> list[EpochRecord]:
        """Remove the next epochs from `unvalidated`, and return their records with these validations."""
        return [replace(self.unvalidated.popleft(), validation=one) for one in evaluations]

    def state(self) -> Values:
        """Return the state to continue from."""
        return {
            "made": self.made,
            "counted": self.counted,
            "lr": float(self.lr),
            "history": [to_json(record) for record in self.history],
            "unvalidated": [to_json(record) for record in self.unvalidated],
        }

    def load_state(self, values: Values, step: int, same_ranks: bool) -> None:
        """Continue at an update of the batches; those of other ranks are `counted`."""
        self.step, self.lr = step, values["lr"]
        self.counted = values["counted"] if same_ranks else values["made"] - step
        self.history = [parse_record(text, EpochRecord) for text in values["history"]]
        self.unvalidated.extend(parse_record(text, EpochRecord) for text in values["unvalidated"])
