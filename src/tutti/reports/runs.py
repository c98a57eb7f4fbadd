"""Finished and unfinished runs, as they lie in their folders."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tutti.errors import BadRunFolder
from tutti.records import STAGES, EpochRecord, Summary, read_history


@dataclass(frozen=True)
class Run:
    """What one training run has left.

    Attributes:
        path: its folder.
        history: the epochs so far.
        damage: one sentence for each line of the history that could not be read.
        summary: of a finished run; None while it is not.
    """

    path: Path
    history: tuple[EpochRecord, ...]
    damage: tuple[str, ...]
    summary: Summary | None

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read a run folder.

        Raises:
            BadRunFolder: it has no records.
        """
        history = read_history(path / "history.jsonl")
        if not history.records:
            raise BadRunFolder(f"{path} has no records of a run; give the folder that 'tutti train' wrote")
        return cls(path, tuple(history.records), tuple(history.damage), _summary(path / "summary.json"))

    @property
    def seconds(self) -> float:
        """Wall time of training, in seconds, without validation."""
        return sum(_training_s(record) for record in self.history)

    @property
    def samples_per_s(self) -> float:
        """Training samples per second."""
        samples = sum(record.train.samples for record in self.history)
        return samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by stage, summed over epochs and ranks."""
        ranks = [rank for record in self.history for rank in record.ranks]
        return {stage: sum(rank.stages.get(stage, 0.0) for rank in ranks) for stage in STAGES}

    @property
    def accuracy(self) -> float | None:
        """The share of the test part, or else of the validation part, that was right; None: neither says."""
        test = self.summary.test if self.summary is not None else None
        for found in (test, self.history[-1].validation):
            if found is not None and "accuracy" in found.metrics:
                return found.metrics["accuracy"]
        return None

    def seconds_to(self, target: float) -> float | None:
        """Seconds of training until the accuracy on the validation part was `target`; None: it never was.

        Between two epochs the accuracy is taken to grow evenly.
        """
        at, before = 0.0, 0.0
        for record in self.history:
            found = record.validation.metrics.get("accuracy") if record.validation else None
            spent = _training_s(record)
            if found is not None and found >= target:
                part = (target - before) / (found - before) if found > before else 1.0
                return at + max(0.0, min(1.0, part)) * spent
            at, before = at + spent, before if found is None else found
        return None


def _training_s(record: EpochRecord) -> float:
    return record.seconds["total"] - record.seconds["validation"]


def _summary(path: Path) -> Summary | None:
    """The summary, if the run has come to its end."""
    try:
        return Summary.from_json(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadRunFolder(
            f"{path} is no summary of a run ({type(error).__name__}: {error}); train again"
        ) from error
