"""Searches without training: the objective is computed, on blocks that random numbers drive."""

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
from tutti.studies.search.jobs import SearchJobs
from tutti.studies.search.objectives import Aim
from tutti.studies.search.space import space_of
from tutti.studies.search.storage import open_study
from tutti.studies.search.trials import Method, Trials

SPACE = space_of({"lr": "log:1e-4..1", "batch_size": "8..64", "optimizer": ["adam", "sgd", "adamw"]})
FEW = space_of({"lr": "log:1e-4..1", "batch_size": "18..21", "optimizer": ["adam", "sgd", "adamw"]})
GRID = space_of({"lr": [0.1, 0.01], "batch_size": [8, 16, 32], "optimizer": ["adam", "sgd"]})
EPOCHS = 9

Curve = Callable[[dict[str, Any], int, int], float]


class Killed(Exception):
    pass


def accuracy(options: dict[str, Any], fold: int, epoch: int) -> float:
    """How good a run with these options is after an epoch: best at lr 0.01, batches of 20, adamw."""
    far = abs(math.log10(options["lr"]) + 2) / 2 + abs(options["batch_size"] - 20) / 100
    far += {"adamw": 0.0, "adam": 0.1, "sgd": 0.2}[options["optimizer"]]
    noise = random.Random(repr((sorted(options.items()), fold, epoch))).gauss(0, 0.005)
    return (1 - far) * (1 - 0.5**epoch) + noise + 0.01 * fold


class Blocks:
    """A farm whose jobs are computed, and whose folders survive when it is killed.

    Attributes:
        trained: epochs that have been trained.
    """

    def __init__(self, path: Path, method: Method, folds: int = 1, trials: int = 24, curve: Curve = accuracy):
        self._path, self._method, self._folds, self._count, self._curve = path, method, folds, trials, curve
        self._aims = [Aim("accuracy", True)]
        self._histories: dict[str, list[EpochRecord]] = {}
        self._finished: dict[str, Summary] = {}
        self._options: dict[str, dict[str, Any]] = {}
        # A Gaussian process looks at whole numbers one by one.
        self._space = {"grid": GRID, "gp": FEW}.get(method.sampler, SPACE)
        self.trained = 0

    def study(self) -> optuna.Study:
        return open_study(self._path, "tutti", self._aims)

    def results(self) -> list[tuple[object, ...]]:
        """What the study has of each trial."""
        return [
            (one.number, one.params, one.state, one.values, one.intermediate_values)
            for one in self.study().get_trials()
        ]

    def source(self) -> SearchJobs:
        """The jobs of a launch."""

        def jobs(number: int, chosen: Any) -> Sequence[FarmJob]:
            names = [f"trial-{number}/job-{fold}" for fold in range(self._folds)]
            self._options.update({name: dict(chosen) for name in names})
            return [
                FarmJob(name, TrainConfig(), prunable=self._method.pruner not in ("none", "data"))
                for name in names
            ]

        return SearchJobs(
            Trials(self.study(), self._space, self._method),
            self._count,
            jobs,
            self._aims,
            self._method.pruner,
            EPOCHS,
            lambda name: self._histories.get(name, []),
        )

    def has_ended(self, source: SearchJobs, job: FarmJob) -> bool:
        """Tell a source how a job has ended, if it has."""
        if job.name in self._finished:
            source.ended(job, JobOutcome(JobState.FINISHED, 0.0, self._finished[job.name]))
        return job.name in self._finished

    def go_on(self, job: FarmJob, chance: random.Random) -> None:
        """Begin a job, or go on with it: of its last epochs there may be no checkpoint."""
        del self._histories.setdefault(job.name, [])[chance.randrange(EPOCHS) :]

    def run(self, blocks: int, seed: int, steps: float = math.inf) -> list[tuple[object, ...]]:
        """Work with so many blocks in an order that the seed decides; killed after so many steps."""
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
        """Work with several launches of two blocks, of which one is killed now and then, and begun again."""
        chance, claims = random.Random(seed), dict[str, Launch]()
        there, left = [Launch(self, claims) for _ in range(launches)], kills
        while there:
            one = chance.choice(there)
            if left and chance.random() < 0.03:
                left -= 1
                one.kill()
                there[there.index(one)] = Launch(self, claims)
            elif not one.step(chance):
                there.remove(one)
        assert left == 0
        return self.results()

    def step(self, source: SearchJobs, running: list[FarmJob], at: int) -> None:
        """Train an epoch of one of the jobs that are running."""
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
    """One of several launches on a farm, which leaves to the others what they have claimed.

    Args:
        farm: what they all see.
        claims: who has a job, by its name.
    """

    def __init__(self, farm: Blocks, claims: dict[str, Launch]) -> None:
        self._farm, self._claims, self._source = farm, claims, farm.source()
        self._running: list[FarmJob] = []
        self._elsewhere: list[FarmJob] = []

    def kill(self) -> None:
        """Leave its jobs to the others."""
        for job in self._running:
            del self._claims[job.name]

    def step(self, chance: random.Random) -> bool:
        """Train an epoch, or look at what others have; False: there is nothing left to do."""
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
    (Method(sampler, pruner, seed=3, ahead=5, epochs=EPOCHS * folds), folds)
    for sampler, pruner, folds in (
        ("tpe", "asha", 1),
        ("tpe", "hyperband", 2),
        ("random", "median", 1),
        ("cma-es", "none", 2),
        ("genetic", "asha", 3),
        ("tpe", "wilcoxon", 4),
        ("tpe", "data", 6),
        ("gp", "none", 1),
        ("grid", "none", 1),
    )
]


@pytest.mark.parametrize(
    ("method", "folds"), METHODS, ids=[one.sampler + "-" + one.pruner for one, _ in METHODS]
)
@pytest.mark.filterwarnings("ignore")
def test_a_search_is_the_same_whoever_runs_what_when_and_however_often_it_is_killed(
    tmp_path: Path, method: Method, folds: int
) -> None:
    # Samplers learn from the eleventh result on, which is there when the fifteenth trial is asked for; those
    # of generations from the sixteenth that is complete.
    count = {"gp": 16, "grid": 12, "genetic": 40}.get(method.sampler, 24)
    whole = Blocks(tmp_path / "whole", method, folds, count).run(1, seed=0)
    assert len(whole) == count
    assert Blocks(tmp_path / "wide", method, folds, count).run(5, seed=1) == whole
    assert Blocks(tmp_path / "several", method, folds, count).run_by(3, seed=3, kills=4) == whole
    killed, chance = Blocks(tmp_path / "killed", method, folds, count), random.Random(2)
    for seed in range(1000):
        try:
            assert killed.run(3, seed, steps=chance.randrange(5, 400)) == whole
            break
        except Killed:
            continue
    else:
        pytest.fail("it never came to its end")
    assert seed > 0


def test_the_next_trial_knows_all_results_but_those_of_the_newest(tmp_path: Path) -> None:
    """What the trials before the newest ones were worth decides the next one; the newest ones do not."""

    def curve(other: int) -> Curve:
        known: list[float] = []

        def value(options: dict[str, Any], fold: int, epoch: int) -> float:
            if options["lr"] not in known:
                known.append(options["lr"])
            return accuracy(options, 0, epoch) + 5 * (known.index(options["lr"]) == other)

        return value

    def parameters(name: str, other: int) -> list[object]:
        blocks = Blocks(tmp_path / name, Method(seed=1, ahead=4), 1, 26, curve(other))
        return [one[1] for one in blocks.run(1, seed=0)]

    plain, early = parameters("plain", -1), parameters("early", 14)
    # Trial 14 is known from trial 18 on.
    assert early[:18] == plain[:18]
    assert early[18:] != plain[18:]


@pytest.mark.parametrize(("pruner", "least"), [("asha", 0.4), ("hyperband", 0.4), ("median", 0.4)])
def test_pruning_saves_epochs_and_finds_the_same_winner(tmp_path: Path, pruner: str, least: float) -> None:
    same, trained = 0, 0
    for seed in range(10):
        method = Method("random", pruner, seed, ahead=4, epochs=EPOCHS)
        blocks = Blocks(tmp_path / str(seed), method, 1, 30)
        blocks.run(2, seed=0)
        trials = blocks.study().get_trials(deepcopy=False)
        # Random trials are the same ones without a pruner.
        winner = max(trials, key=lambda trial: accuracy(trial.params, 0, EPOCHS))
        same += blocks.study().best_trial.number == winner.number
        trained += blocks.trained
    assert same >= 9
    assert 1 - trained / (10 * 30 * EPOCHS) >= least


def test_a_grid_is_every_combination_once(tmp_path: Path) -> None:
    found = Blocks(tmp_path / "study", Method("grid", ahead=5, epochs=EPOCHS), 1, 12).run(2, seed=0)
    assert len({repr(one[1]) for one in found}) == 12


def test_others_read_the_study(tmp_path: Path) -> None:
    Blocks(tmp_path / "study", Method("random", epochs=EPOCHS), 1, 5).run(2, seed=0)
    file = optuna.storages.journal.JournalFileBackend(str(tmp_path / "study"))
    study = optuna.load_study(study_name="tutti", storage=optuna.storages.JournalStorage(file))
    assert len(study.trials) == 5
    assert study.best_value == max(one.value for one in study.trials if one.value is not None)


def test_a_trial_that_fails_fails_alone(tmp_path: Path) -> None:
    def broken(options: dict[str, Any], fold: int, epoch: int) -> float:
        return math.nan if options["optimizer"] == "sgd" else accuracy(options, fold, epoch)

    found = Blocks(tmp_path / "study", Method("random", epochs=EPOCHS), 1, 12, broken).run(2, seed=0)
    states = {one[1]["optimizer"]: one[2] for one in found}  # type: ignore[index]
    assert states["sgd"] is optuna.trial.TrialState.FAIL
    assert states["adam"] is optuna.trial.TrialState.COMPLETE


def test_a_line_that_a_full_disk_has_cut_off_makes_way(tmp_path: Path) -> None:
    method = Method("random", epochs=EPOCHS)
    whole = Blocks(tmp_path / "whole", method, trials=4).run(2, seed=0)
    Blocks(tmp_path / "study", method, trials=2).run(2, seed=0)
    with (tmp_path / "study").open("ab") as file:
        file.write(b'{"op_code":4,"worker')
    assert Blocks(tmp_path / "study", method, trials=4).run(2, seed=0) == whole
    text = (tmp_path / "study").read_bytes()
    (tmp_path / "study").write_bytes(text.replace(b"{", b"?", 1))
    with pytest.raises(BadRunFolder, match="study is damaged"):
        Blocks(tmp_path / "study", method).study()
