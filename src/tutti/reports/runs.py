"""Finished and unfinished runs, read from their folders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tutti.errors import BadRunFolder
from tutti.records.run import STAGES, EpochRecord, RunStart, Summary, counting, ranks_in_turn
from tutti.records.run_folder import CONFIG, RunFolder, TrainedOn
from tutti.records.texts import best_text, early_text, resumed_text
from tutti.records.usage import UsageRecord
from tutti.reports.advice import stages_by_rank


@dataclass(frozen=True)
class Run:
    """The records of one training run."""

    path: Path
    history: tuple[EpochRecord, ...]
    damage: tuple[str, ...]
    summary: Summary | None
    config: Mapping[str, Any] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    usage: tuple[UsageRecord, ...] = ()
    starts: tuple[RunStart, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Run:
        """Read a run folder.

        Raises:
            BadRunFolder: it has no records, or a file of it is something else.
        """
        folder = RunFolder(path)
        history, starts = folder.lines(EpochRecord), folder.lines(RunStart)
        if folder.has(CONFIG) and not history.records:
            raise BadRunFolder(f"{folder.unfinished}, so there is nothing to report yet; {folder.next_step}")
        if not history.records:
            raise BadRunFolder(f"{path} has no records of a run; give the folder that 'tutti train' wrote")
        usage, data = folder.usage(), folder.find(TrainedOn)
        return cls(
            path=path,
            history=tuple(history.records),
            damage=(*history.damage, *usage.damage, *starts.damage),
            summary=folder.find(Summary),
            config=folder.config() if folder.has(CONFIG) else {},
            labels=() if data is None else tuple(map(str, data.labels)),
            usage=tuple(usage.records),
            starts=tuple(starts.records),
        )

    @property
    def finished(self) -> bool:
        """True if it has finished."""
        return self.summary is not None

    @property
    def cores_in_turn(self) -> list[int]:
        """The numbers of threads over all ranks, in turn; empty if the number never changed."""
        if not ranks_in_turn(self.starts):
            return []
        return [start.world.ranks * start.world.threads for start in counting(self.starts)]

    @property
    def validated(self) -> bool:
        """True if it has a validation part."""
        return any(record.validation is not None for record in self.history)

    @property
    def epoch_seconds(self) -> list[float]:
        """Seconds of training of each epoch, without validation."""
        return [record.seconds["total"] - record.seconds["validation"] for record in self.history]

    @property
    def epochs(self) -> list[float | None]:
        """The number of epochs up to each record; None if the run is shorter than one."""
        first = self.history[0] if self.history else None
        if first is None or not first.complete:
            return [None] * len(self.history)
        return [
            float(one.epoch)
            if one.complete
            else round(one.epoch - 1 + one.train.samples / first.train.samples, 3)
            for one in self.history
        ]

    @property
    def seconds(self) -> float:
        """Wall time of training, in seconds, without validation."""
        return sum(self.epoch_seconds)

    @property
    def samples(self) -> int:
        """The training samples of all ranks."""
        return sum(record.train.samples for record in self.history)

    @property
    def samples_per_s(self) -> float:
        """Training samples per second."""
        return self.samples / self.seconds if self.seconds > 0 else 0.0

    @property
    def rank_stages(self) -> list[dict[str, float]]:
        """Seconds by stage of each rank, summed over the epochs."""
        return stages_by_rank(self.history)

    @property
    def stages(self) -> dict[str, float]:
        """Seconds by stage, summed over epochs and ranks."""
        return {stage: sum(rank[stage] for rank in self.rank_stages) for stage in STAGES}

    @property
    def staleness(self) -> Counter[int]:
        """The number of exchanges by staleness in updates, over all ranks and epochs."""
        ranks = (rank for record in self.history for rank in record.ranks)
        return sum((Counter(rank.staleness) for rank in ranks), Counter[int]())

    def metrics_on(self, part: str) -> dict[str, float]:
        """Return the metrics on the "test" part, or those of the last epoch on the "validation" part."""
        test = None if self.summary is None else self.summary.test
        found = test if part == "test" else self.history[-1].validation
        return {} if found is None else found.metrics

    @property
    def best(self) -> str | None:
        """A sentence about the best epoch; None if there is none."""
        return None if self.summary is None else best_text(self.summary, self.history)

    @property
    def course(self) -> list[str]:
        """Sentences about the learning rate, about where the run was resumed, and why it ended early."""
        before = (None, *self.starts)
        found = [start.lr_why for start in self.starts if start.lr_why]
        found += [
            f"on {_moment(start.time)}, {resumed_text(start, earlier)}"
            for earlier, start in zip(before, self.starts, strict=False)
            if start.step
        ]
        early = None if self.summary is None else early_text(self.summary)
        return found if early is None else [*found, early]

    def seconds_to(self, target: float) -> float | None:
        """Return the seconds of training until the validation accuracy reached `target`; None: never.

        Between two epochs the accuracy is interpolated.
        """
        points, seconds = [], 0.0
        for record, spent in zip(self.history, self.epoch_seconds, strict=True):
            seconds += spent
            if record.validation is not None and "accuracy" in record.validation.metrics:
                points.append((seconds, float(record.step), record.validation.metrics["accuracy"]))
        reached = crossing(points, target)
        return None if reached is None else reached[0]


def _moment(time: str) -> str:
    """Return an ISO 8601 time in words; return other texts unchanged."""
    try:
        return datetime.fromisoformat(time).astimezone(UTC).strftime("%Y-%m-%d at %H:%M UTC")
    except (ValueError, OverflowError):
        return time


def crossing(points: Iterable[tuple[float, float, float]], target: float) -> tuple[float, float] | None:
    """Interpolate the seconds and the step at which the accuracy reached `target`."""
    before = (0.0, 0.0, 0.0)
    for point in points:
        if point[2] >= target:
            part = max(0.0, (target - before[2]) / (point[2] - before[2])) if point[2] > before[2] else 1.0
            return before[0] + part * (point[0] - before[0]), before[1] + part * (point[1] - before[1])
        before = point
    return None
