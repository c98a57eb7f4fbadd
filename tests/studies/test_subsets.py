"""Subsets of the data, and searches that train on small ones first."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from tutti.cli.main import main
from tutti.data.splits import split
from tutti.errors import BadOption
from tutti.records.farm_folder import FarmFolder
from tutti.records.run import Summary
from tutti.records.run_folder import RunFolder
from tutti.records.splits import Split
from tutti.studies.search.objectives import aims_of
from tutti.studies.search.pruners import DIVISORS
from tutti.studies.search.storage import open_study_of
from tutti.studies.subsets import subsets_of


def test_each_subset_has_the_smaller_ones_its_share_of_classes_and_none_of_what_is_held_out() -> None:
    targets = np.random.default_rng(0).choice(3, 1000, p=[0.6, 0.3, 0.1])
    kept, held_out = split(targets, 0.1, 4, 3)
    found = subsets_of(targets, [Split(kept, held_out)], 4, 3, DIVISORS)
    assert [len(one.train) for one in found] == [100, 300, 900]
    assert (found[-1].train == kept).all()
    for small, large in pairwise(found):
        assert set(small.train) < set(large.train)
    for one, divisor in zip(found, DIVISORS, strict=True):
        assert (one.test == held_out).all()
        whole = np.bincount(targets[kept]) / divisor
        assert (abs(np.bincount(targets[one.train]) - whole) < 1).all()
    whole = Split(np.arange(90), np.arange(90, 100))
    amounts = subsets_of(np.linspace(0, 1, 100), [whole], 0, None, DIVISORS)
    assert [len(one.train) for one in amounts] == [10, 30, 90]
    with pytest.raises(BadOption, match="one in 9 samples first, and there are 14"):
        subsets_of(np.arange(16) % 2, [whole, Split(np.arange(14), np.arange(14, 16))], 0, 2, DIVISORS)


def test_each_fold_has_subsets_of_its_own_training_part(tmp_path: Path) -> None:
    words = ["tune", "mlp", "--space.lr", "log:1e-3..1e-1", "--trials", "3", "--epochs", "1", "--ahead", "1"]
    words += ["--threads", "1", "--out", str(tmp_path / "farm")]
    assert main([*words, "--successive", "data", "--folds", "2", "--stratified"]) == 0
    folder = FarmFolder.open(tmp_path / "farm")
    with np.load(folder.splits) as file:
        splits = [Split(file[f"train-{one}"], file[f"test-{one}"]) for one in range(6)]
    wholes = splits[4:]
    held_out = np.concatenate([one.test for one in wholes])
    assert sorted(held_out) == [*range(len(wholes[0].train) + len(wholes[0].test))]
    for number, one in enumerate(splits):
        whole, divisor = wholes[number % 2], DIVISORS[number // 2]
        assert set(one.train) <= set(whole.train)
        assert abs(len(one.train) - len(whole.train) / divisor) <= 10
        assert (one.test == whole.test).all()
    trials = open_study_of(folder, aims_of(["accuracy"])).trials
    for trial in trials:
        for subset, value in enumerate(trial.intermediate_values.values()):
            runs = [folder.job(f"trial-{trial.number:04}/subset-{subset}/fold-{fold}") for fold in range(2)]
            ended = [RunFolder(run).read(Summary).validation for run in runs]
            assert value == fmean(one.metrics["accuracy"] for one in ended if one)
            assert [RunFolder(run).config()["seed"] for run in runs] == [0, 1]
        assert trial.value == value
    assert len(trials[0].intermediate_values) == len(DIVISORS)


def test_a_search_on_small_subsets_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["tune", "mlp", "--space.lr", "log:1e-3..1", "--trials", "6", "--epochs", "1", "--ahead", "2"]
    assert main([*words, "--successive", "data", "--out", str(tmp_path / "farm")]) == 0
    said = capsys.readouterr().out
    assert "successive data, at most 2 trials at a time" in said
    folder = FarmFolder.open(tmp_path / "farm")
    trials = open_study_of(folder, aims_of(["accuracy"])).trials
    runs = {path: RunFolder(path).read(Summary) for path in (folder.path / "jobs").glob("*/*")}
    assert {len(one.intermediate_values) for one in trials} >= {1, 3}
    for trial in trials:
        names = [
            f"trial-{trial.number:04}/subset-{subset}" for subset in range(len(trial.intermediate_values))
        ]
        ended = [runs[folder.job(name)].validation for name in names]
        assert list(trial.intermediate_values) == [1, 3, 9][: len(names)]
        assert [one and one.metrics["accuracy"] for one in ended] == [*trial.intermediate_values.values()]
        assert trial.value == [*trial.intermediate_values.values()][-1]
    cost = sum([1 / 9, 1 / 3, 1][int(path.name[-1])] for path in runs)
    assert f"epochs: {cost:.0f} of 6 trained, {1 - cost / 6:.0%} saved" in said
    # On all samples it is the run that is shown.
    best = max((one for one in trials if len(one.intermediate_values) == 3), key=lambda one: one.value or 0)
    assert (
        main(
            ["train", "mlp", "--lr", repr(best.params["lr"]), "--epochs", "1", "--out", str(tmp_path / "run")]
        )
        == 0
    )
    alone = RunFolder(tmp_path / "run").read(Summary).validation
    assert alone is not None
    assert alone.metrics["accuracy"] == best.value


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--successive", "date"], "did you mean 'data'"),
        (["--successive", "data", "--pruner", "asha"], "leave --pruner asha out"),
        (["--successive", "data", "--objective", "accuracy,loss"], "by one objective"),
        (["--successive", "data", "--objective", "seconds"], "give loss or a metric"),
        (["--successive", "data", "--validation", "0"], "give a share"),
    ],
)
def test_what_it_does_not_go_with(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "mlp", "--space.lr", "0.1,0.2", *words]) == 2
    assert said in capsys.readouterr().err
