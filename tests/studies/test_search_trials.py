"""Searches without training: a formula gives the objective, and random numbers the order of events."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest

from tutti.errors import BadRunFolder
from tutti.farm.jobs import FarmJob, JobOutcome
from tutti.records.farm_folder import JobState
from tutti.records.run import EpochRecord, Evaluation, Summary, World
from tutti.run.config import TrainConfig
from tutti.studies.score import Score
from tutti.studies.search.jobs import SearchJobs
from tutti.studies.search.space import space_of
from tutti.studies.search.trials import Method, Trials, open_study

SPACE = space_of({"lr": "log:1e-4..1", "batch_size": "8..64", "optimizer": ["adam", "sgd", "adamw"]})
FEW = space_of({"lr": "log:1e-4..1", "batch_size": "18..21", "optimizer": ["adam", "sgd", "adamw"]})
GRID = space_of({"lr": [0.1, 0.01], "batch_size": [8, 16, 32], "optimizer": ["adam", "sgd"]})
EPOCHS = 9

Curve = Callable[[dict[str, Any], int, int], float]


class Killed(Exception):
    pass


def accuracy(options: dict[str, Any], fold: int, epoch: int) -> float:
    """Return the accuracy after an epoch, which is best for lr 0.01, batches of 20, and adamw."""
    far = abs(math.log10(options["lr"]) + 2) / 2 + abs(options["batch_size"] - 20) / 100
    far += {"adamw": 0.0, "adam": 0.1, "sgd": 0.2}[options["optimizer"]]
    noise = random.Random(repr((sorted(options.items()), fold, epoch))).gauss(0, 0.005)
    return (1 - far) * (1 - 0.5**epoch) + noise + 0.01 * fold


class Blocks:
    """A farm with simulated jobs, whose folders survive when it is killed."""

    def __init__(self, path: Path, method: Method, folds: int = 1, trials: int = 24, curve: Curve = accuracy):
        self._path, self._method, self._folds, self._count, self._curve = path, method, folds, trials, curve
        self._scores = [Score("accuracy", True)]
        self._histories: dict[str, list[EpochRecord]] = {}
        self._finished: dict[str, Summary] = {}
        self._options: dict[str, dict[str, Any]] = {}
        # A Gaussian process evaluates whole numbers one by one.
        self._space = {"grid": GRID, "gp": FEW}.get(method.sampler, SPACE)
        path.mkdir(exist_ok=True)
        self.trained = 0  # epochs

    def study(self) -> optuna.Study:
        return open_study(self._path, self._scores)

    def results(self) -> list[tuple[object, ...]]:
        """Return the study's record of each trial."""
        return [
            (one.number, one.params, one.state, one.values, one.intermediate_values)
            for one in self.study().get_trials()
        ]

    def source(self) -> SearchJobs:
        """Return the jobs of a launch."""

        def jobs(number: int, chosen: Any) -> Sequence[FarmJob]:
            names = [f"trial-{number}/job-{fold}" for fold in range(self._folds)]
            self._options.update({name: dict(chosen) for name in names})
            return [FarmJob(name, TrainConfig(), prunable=self._method.pruner != "none") for name in names]

        return SearchJobs(
            Trials(self._path, self.study(), self._space, self._method),
            self._count,
            jobs,
            self._scores,
            self._method.pruner != "none",
            EPOCHS,
            lambda name: self._histories.get(name, []),
        )

    def has_ended(self, source: SearchJobs, job: FarmJob) -> bool:
        """Pass the outcome of a job to a source, if it has ended."""
        if job.name in self._finished:
            source.ended(job, JobOutcome(JobState.FINISHED, 0.0, self._finished[job.name]))
        return job.name in self._finished

    def go_on(self, job: FarmJob, chance: random.Random) -> None:
        """Begin or resume a job; its last epochs may have no checkpoint."""
        del self._histories.setdefault(job.name, [])[chance.randrange(EPOCHS) :]

    def run(self, blocks: int, seed: int, steps: float = math.inf) -> list[tuple[object, ...]]:
        """Work on blocks, in an order that the seed decides; raise `Killed` after `steps`."""
        chance, source = random.Random(seed), self.source()
        running: list[FarmJob] = []
        while True:
            while len(running) < blocks and (job := source.next()) is not None:
                if not self.has_ended(source, job):
                    self.go_on(job, chance)
                    running.append(job)
            if not running:
                return self.results()
            if steps <= 0:
                raise Killed
            steps -= 1
            self.step(source, running, chance.randrange(len(running)))

    def run_by(self, launches: int, seed: int, kills: int) -> list[tuple[object, ...]]:
        """Work in several launches of two blocks; launches are killed at random and replaced."""
        chance, claims = random.Random(seed), dict[str, Launch]()
        there, left = [Launch(self, claims) for _ in range(launches)], kills
        while there:
            one = chance.choice(there)
            if left and chance.random() < 0.1:
                left -= 1
                one.kill()
                there[there.index(one)] = Launch(self, claims)
            elif not one.step(chance):
                there.remove(one)
        assert left == 0
        return self.results()

    def step(self, source: SearchJobs, running: list[FarmJob], at: int) -> None:
        """Train an epoch of a running job."""
        job = running[at]
        history = self._histories[job.name]
        fold = int(job.name.rpartition("-")[2])
        value = self._curve(self._options[job.name], fold, len(history) + 1)
        found = Evaluation(100, 1 - value, {"accuracy": value})
        seconds = {"total": 1.0, "validation": 0.0}
        record = EpochRecord(len(history) + 1, len(history) + 1, True, found, found, seconds, 1.0, 0.1, "")
        history.append(record)
        self.trained += 1
        ends = source.epoch(job, record)
        if (ends and job.prunable) or len(history) == EPOCHS:
            running.pop(at)
            summary = Summary(None, found, 1, len(history), 1, 1, 1.0, 1.0, World(), {}, "")
            self._finished[job.name] = summary
            source.ended(job, JobOutcome(JobState.FINISHED, 1.0, summary))


class Launch:
    """One of several launches on a farm; it leaves the claimed jobs to the others."""

    def __init__(self, farm: Blocks, claims: dict[str, Launch]) -> None:
        self._farm, self._claims, self._source = farm, claims, farm.source()
        self._running: list[FarmJob] = []
        self._elsewhere: list[FarmJob] = []

    def kill(self) -> None:
        """Leave its jobs to the others."""
        for job in self._running:
            del self._claims[job.name]

    def step(self, chance: random.Random) -> bool:
        """Train an epoch, or look at the jobs of others; return False if there is nothing to do."""
        waiting, self._elsewhere = self._elsewhere, []
        while waiting or (len(self._running) < 2 and (job := self._source.next()) is not None):
            job = waiting.pop() if waiting else job
            if self._farm.has_ended(self._source, job):
                continue
            if len(self._running) == 2 or self._claims.get(job.name, self) is not self:
                self._elsewhere.append(job)
                continue
            self._claims[job.name] = self
            self._farm.go_on(job, chance)
            self._running.append(job)
        if not self._running:
            return bool(self._elsewhere)
        self._farm.step(self._source, self._running, chance.randrange(len(self._running)))
        return True


METHODS = [
    (Method(sampler, pruner, seed=3, epochs=EPOCHS * folds), folds)
    for sampler, pruner, folds in (
        ("tpe", "asha", 1),
        ("tpe", "hyperband", 2),
        ("random", "median", 1),
        ("cma-es", "none", 2),
        ("genetic", "asha", 3),
        ("gp", "none", 1),
        ("grid", "none", 1),
    )
]
KINDS = [f"{one.sampler}-{one.pruner}" for one, _ in METHODS]
COUNTS = {"gp": 12, "grid": 12}


@pytest.mark.parametrize(("method", "folds"), METHODS, ids=KINDS)
@pytest.mark.filterwarnings("ignore")
def test_one_block_makes_the_same_trials_if_it_is_killed(tmp_path: Path, method: Method, folds: int) -> None:
    count = COUNTS.get(method.sampler, 20)
    whole = Blocks(tmp_path / "whole", method, folds, count).run(1, seed=0)
    assert len(whole) == count
    killed, chance = Blocks(tmp_path / "killed", method, folds, count), random.Random(2)
    for seed in range(1000):
        try:
            assert killed.run(1, seed, steps=chance.randrange(5, 400)) == whole
            break
        except Killed:
            continue
    assert 0 < seed < 999


@pytest.mark.parametrize(("method", "folds"), METHODS, ids=KINDS)
@pytest.mark.filterwarnings("ignore")
def test_several_launches_end_all_trials_if_some_are_killed(
    tmp_path: Path, method: Method, folds: int
) -> None:
    count = COUNTS.get(method.sampler, 20)
    found = Blocks(tmp_path / "study", method, folds, count).run_by(3, seed=3, kills=4)
    assert [one[0] for one in found] == list(range(count))
    ended = {optuna.trial.TrialState.COMPLETE, optuna.trial.TrialState.PRUNED}
    assert {one[2] for one in found} <= ended
    assert method.sampler != "grid" or len({repr(one[1]) for one in found}) == count


@pytest.mark.parametrize("pruner", ["asha", "hyperband", "median"])
def test_pruning_saves_epochs_and_finds_the_same_winner(tmp_path: Path, pruner: str) -> None:
    same, trained, seeds = 0, 0, 3
    for seed in range(seeds):
        method = Method("random", pruner, seed, epochs=EPOCHS)
        blocks = Blocks(tmp_path / str(seed), method, 1, 30)
        blocks.run(2, seed=0)
        trials = blocks.study().get_trials(deepcopy=False)
        # Random trials are the same ones without a pruner.
        winner = max(trials, key=lambda trial: accuracy(SPACE.options(trial.params), 0, EPOCHS))
        same += blocks.study().best_trial.number == winner.number
        trained += blocks.trained
    assert same >= seeds - 1
    assert 1 - trained / (seeds * 30 * EPOCHS) >= 0.4


def test_optuna_can_load_the_study(tmp_path: Path) -> None:
    Blocks(tmp_path / "study", Method("random", epochs=EPOCHS), 1, 5).run(2, seed=0)
    file = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study/study.journal"))
    study = optuna.load_study(study_name="tutti", storage=optuna.storages.JournalStorage(file))
    assert len(study.trials) == 5
    assert study.best_value == max(one.value for one in study.trials if one.value is not None)


def test_a_trial_that_fails_fails_alone(tmp_path: Path) -> None:
    def broken(options: dict[str, Any], fold: int, epoch: int) -> float:
        return math.nan if options["optimizer"] == "sgd" else accuracy(options, fold, epoch)

    found = Blocks(tmp_path / "study", Method("random", epochs=EPOCHS), 1, 12, broken).run(2, seed=0)
    states = {one[1]["optimizer"].strip('"'): one[2] for one in found}  # type: ignore[index]
    assert states["sgd"] is optuna.trial.TrialState.FAIL
    assert states["adam"] is optuna.trial.TrialState.COMPLETE


def test_a_damaged_journal_is_named(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path / "study", Method("random", epochs=EPOCHS), trials=2)
    blocks.run(2, seed=0)
    file = tmp_path / "study/study.journal"
    file.write_bytes(file.read_bytes().replace(b"{", b"?", 1))
    with pytest.raises(BadRunFolder, match=r"study\.journal is damaged"):
        blocks.study()
