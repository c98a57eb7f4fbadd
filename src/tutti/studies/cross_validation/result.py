"""The result of a cross-validation, read from its folder."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import IO, Final

import numpy as np

from tutti.errors import BadRunFolder, UnknownName
from tutti.records.farm_folder import FarmFolder, JobState
from tutti.records.json_lines import Json
from tutti.records.predictions import Predictions
from tutti.records.run import Summary
from tutti.records.run_folder import PREDICTIONS, RunFolder
from tutti.records.texts import printable
from tutti.studies.cross_validation.scores import FoldScores, best_first, write_scores
from tutti.studies.cross_validation.significance import Difference, compare, write_comparison
from tutti.studies.score import AUTO, Score, score_by_metrics
from tutti.tables import TextTable
from tutti.terminal import console_on

KIND: Final = "cv"
"""The kind of the farm."""

SCORES: Final = "scores.csv"
COMPARISON: Final = "compare.csv"

MANY: Final = 6
"""Of more comparisons, only those with the best candidate are shown."""


def job_name(candidate: str, fold: int) -> str:
    """Name the job of a fold, counted from 0."""
    return f"{candidate}/fold-{fold}"


@dataclass(frozen=True)
class CrossValidated:
    """The result of `tutti.cross_validate`; `print` shows the scores and the comparison.

    Attributes:
        scores: of each candidate, by name, such as "lenet/cosine": those of its folds, their mean and
            deviation, and the confusion matrix.
        comparison: of each pair of candidates; `sentence` is in words.
        failed: the failed jobs, each with the reason in one line.
        folder: of the farm, with all runs and the tables.
        labels: the names of the classes; empty: unknown.
        left: the number of unfinished jobs.
    """

    scores: dict[str, FoldScores]
    comparison: list[Difference] = field(repr=False)
    failed: dict[str, str]
    folder: Path
    labels: tuple[str, ...] = field(default=(), repr=False)
    left: int = 0

    @classmethod
    def read(cls, folder: FarmFolder) -> CrossValidated:
        """Read the result from the folder of a farm, finished or not.

        Raises:
            BadRunFolder: the folder is not of a cross-validation, or a file in it is damaged.
        """
        question = question_of(folder)
        failed, left = dict[str, str](), 0
        runs = dict[str, list[Summary | None]]()
        for name in question["candidates"]:
            runs[name] = []
            for fold in range(len(question["ratios"])):
                job = job_name(name, fold)
                state = folder.state(job)
                finished = state is JobState.FINISHED
                runs[name].append(RunFolder(folder.job(job)).read(Summary) if finished else None)
                if state is JobState.FAILED:
                    failed[job] = (RunFolder(folder.job(job)).error() or "").strip().rpartition("\n")[2]
                elif not finished:
                    left += 1
        known = [one.validation for found in runs.values() for one in found if one and one.validation]
        score = score_by_metrics(known) if question["score"] == AUTO else Score.read(question["score"])
        scores = {name: FoldScores.of(score, found) for name, found in runs.items() if any(found)}
        comparison = compare({name: scores[name] for name in best_first(scores)}, question["ratios"])
        return cls(scores, comparison, failed, folder.path, tuple(question["labels"]), left)

    @property
    def best(self) -> str:
        """The candidate with the best mean; candidates with a score of each fold come first.

        The comparison says whether the difference is significant.
        """
        return best_first(self.scores)[0]

    @property
    def ties(self) -> list[str]:
        """The best candidate, and the others without a significant difference from it."""
        best, *others = best_first(self.scores)
        alike = [{one.first, one.second} for one in self.comparison if not one.why and one.better is None]
        return [best, *(name for name in others if {best, name} in alike)]

    @property
    def verdict(self) -> str:
        """The best candidate in words, and its ties; "": there is no score."""
        if not self.scores:
            return ""
        best, *ties = self.ties
        one = self.scores[best]
        text = f"best mean: {best}, {one.score.text(one.mean)}"
        return text + (f". A tie, as no difference is significant, with: {'; '.join(ties)}" if ties else "")

    def predictions(self, name: str) -> Predictions:
        """Return the predictions of a candidate for all held-out samples, in the order of the data.

        With repeats there is one for each time that a sample was held out.

        Raises:
            UnknownName: the candidate has no scores.
        """
        if name not in self.scores:
            raise UnknownName("candidate", name, self.scores)
        folder = FarmFolder.open(self.folder)
        jobs = [folder.job(job_name(name, fold)) for fold in range(len(self.scores[name].folds))]
        parts = [Predictions.read(job / PREDICTIONS) for job in jobs if (job / PREDICTIONS).is_file()]
        rows, outputs, targets = (
            np.concatenate([getattr(one, part) for one in parts]) for part in ("rows", "outputs", "targets")
        )
        order = np.argsort(rows, kind="stable")
        return Predictions(rows[order], outputs[order], targets[order])

    def __str__(self) -> str:
        text = StringIO()
        self.print_to(text)
        return text.getvalue().rstrip()

    def print_to(self, stream: IO[str]) -> None:
        """Print the scores and the significant differences."""
        heads, rows = self.rows()
        table = TextTable(heads)
        for row in rows:
            table.add_row(*row)
        if rows:
            console_on(stream).print(table)
        shown = self.comparison
        if len(shown) > MANY:
            shown = [one for one in shown if self.best in (one.first, one.second)]
        for one in shown:
            print(printable(one.sentence), file=stream)
        if len(shown) < len(self.comparison):
            print(f"{len(self.comparison) - len(shown)} further comparisons are in {COMPARISON}", file=stream)

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Return the heads and the rows of the table of scores, the best candidate first."""
        names = best_first(self.scores)
        metric = str(self.scores[names[0]].score) if names else ""
        rows = []
        for name in names:
            one = self.scores[name]
            folds = f"{len(one.known)} of {len(one.folds)}" if one.missing else f"{len(one.folds)}"
            seconds = "" if math.isnan(one.seconds_each) else f"{one.seconds_each:.2f}"
            rows.append([name, one.score.text(one.mean), one.score.text(one.deviation), folds, seconds])
        return ["candidate", metric, "deviation", "folds", "seconds each"], rows

    def write_tables(self) -> None:
        """Write the tables of scores and of differences."""
        write_scores(self.folder / SCORES, self.scores, self.labels)
        write_comparison(self.folder / COMPARISON, self.comparison)


def question_of(folder: FarmFolder) -> Json:
    """Return the question of a cross-validation, as recorded by `CrossValidation.begin`."""
    if folder.plan.kind != KIND:
        raise BadRunFolder(f"{folder.path} is no cross-validation; give a folder that 'tutti cv' wrote")
    return folder.plan.question
