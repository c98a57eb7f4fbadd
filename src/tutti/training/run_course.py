"""How far a run has come: what of a trainer's state is neither model nor optimizer nor batches."""

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
    """An epoch that is under way.

    Attributes:
        number: from 0.
        began: when it did, by the trainer's clock.
        tally: of the training samples.
    """

    number: int
    began: float
    tally: Tally


@dataclass
class TrainingState:
    """The course of a run on one rank.

    Attributes:
        step: the updates made, by the numbers of the batches.
        counted: the steps made besides, with batches dealt to other ranks, before the run was resumed.
        lr: the learning rate of the last update.
        history: the records of all epochs whose validation is known.
        unvalidated: those of later epochs.
        resumed: the epoch that the run goes on in; None: it begins one.
        stopped: why the run has stopped before its end, to go on another time; None: it has not.
        ended: why it has come to its end before the last update; None: it has not.
        restored: the epoch whose weights are the final ones; None: the last.
        final: the final weights on the validation part; None: there is none, or the run has stopped.
    """

    step: int = 0
    counted: int = 0
    lr: float = math.nan
    history: list[EpochRecord] = field(default_factory=list)
    unvalidated: deque[EpochRecord] = field(default_factory=deque)
    resumed: OpenEpoch | None = None
    stopped: str | None = None
    ended: str | None = None
    restored: EpochRecord | None = None
    final: Evaluation | None = None

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

    def complete(self, found: Sequence[Evaluation | None]) -> list[EpochRecord]:
        """Return the records of the next epochs with their validations, which are then no longer awaited."""
        return [replace(self.unvalidated.popleft(), validation=one) for one in found]

    def state(self) -> Values:
        """Return what must be known to go on from here."""
        return {
            "made": self.made,
            "counted": self.counted,
            "lr": float(self.lr),
            "history": [to_json(record) for record in self.history],
            "unvalidated": [to_json(record) for record in self.unvalidated],
        }

    def load_state(self, values: Values, step: int, same_ranks: bool) -> None:
        """Go on at an update of the batches; those of other ranks count beside."""
        self.step, self.lr = step, values["lr"]
        self.counted = values["counted"] if same_ranks else values["made"] - step
        self.history = [parse_record(text, EpochRecord) for text in values["history"]]
        self.unvalidated.extend(parse_record(text, EpochRecord) for text in values["unvalidated"])
