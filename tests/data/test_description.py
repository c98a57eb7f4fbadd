"""What `tutti data` says of a data set."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tutti.cli.commands import run
from tutti.data.description import describe, problems
from tutti.data.sources import read_source


def described(data, **options):
    contents = replace(read_source(data, {"missing": "mean", **options}), filled="missing" in options)
    parts = describe(contents)
    return parts, problems(contents, parts)


def test_a_table_is_described_by_its_columns(tmp_path, capsys):
    (tmp_path / "train.csv").write_text("a,b,y\n1,500,u\n,700,v\n3,500,u\n1,500,v\n")
    (tmp_path / "test.csv").write_text("a,b,y\n3,500,u\n4,600,v\n")
    (train, test), said = described(str(tmp_path), prepare="off")
    a, b = train.inputs
    assert (a.name, a.mean, a.least, a.most, a.missing) == ("a", 5 / 3, 1, 3, 1)
    assert a.deviation == pytest.approx(np.std([1, 3, 1]), rel=1e-12)
    assert (b.mean, train.counts, test.counts) == (550, (2, 2), (1, 1))
    assert (train.repeated, train.trained, test.trained) == (1, 0, 1)
    assert [line.split(":")[0] for line in said] == [
        "1 of 4 train samples have missing values",
        "1 of 2 test samples are in the training part, too",
        "1 training samples are there more than once",
        "b has the mean 550 and the deviation 86.6",
    ]
    assert not any(
        "--data.missing" in line for line in described(str(tmp_path), prepare="off", missing="mean")[1]
    )
    assert run(["data", str(tmp_path), "--data.prepare", "off"]) == 0
    shown = capsys.readouterr().out
    assert "train:                 4 samples, 1 of them repeated" in shown
    assert "--data.missing drop" in shown


def test_two_targets_are_described_by_their_names(tmp_path, capsys):
    (tmp_path / "a.csv").write_text("p,a,b\n" + "".join(f"{n},{n % 2},{n // 2 % 2}\n" for n in range(8)))
    assert run(["data", str(tmp_path / "a.csv"), "--data.target", "a,b"]) == 0
    shown = capsys.readouterr().out
    assert "; 2 labels of 0 or 1 (a, b)\n" in shown
    assert [line.split()[0] for line in shown.splitlines() if line.endswith(" 0")] == ["p", "a", "b"]


def test_a_table_is_described_with_its_preparation(tmp_path, capsys):
    rows = [f"{n},{'' if n == 3 else n * 7 % 5},{n % 3}x,2024-0{n % 9 + 1}-01,{n % 2}\n" for n in range(40)]
    (tmp_path / "a.csv").write_text("id,a,b,day,y\n" + "".join(rows))
    assert run(["data", str(tmp_path / "a.csv")]) == 0
    shown = capsys.readouterr().out
    assert "table: 1 number, 1 text (one-hot: 3 columns), 1 date; gaps in 1 column become the median" in shown
    assert "left out: id (row numbers)" in shown
    assert "nothing seems wrong" in shown


def test_pictures_and_values_are_described():
    random = np.random.default_rng(0)
    x = random.integers(0, 256, (50, 3, 4, 5), dtype=np.uint8)
    x[:, 2] = 7
    y = random.normal(1000, 1, 50)
    (train,), said = described((x, y))
    assert [one.mean for one in train.inputs] == pytest.approx(x.mean(axis=(0, 2, 3)), rel=1e-12)
    assert [one.deviation for one in train.inputs] == pytest.approx(x.std(axis=(0, 2, 3)), rel=1e-9)
    assert train.targets[0].most == pytest.approx(y.max(), rel=1e-6)
    assert [line.partition(" 1e+03")[0] for line in said] == [
        "channel 2 never changes: it takes time and tells nothing",
        "target has the mean",
    ]


def test_a_small_deviation_from_a_large_mean_is_kept(monkeypatch):
    monkeypatch.setattr("tutti.data.arrays.CHUNK", 7)
    x = 1e9 + np.random.default_rng(0).normal(0, 5, (50, 1))
    x[3] = np.nan
    ((train,), _) = described((x, np.arange(50.0) / 4))
    assert train.inputs[0].deviation == pytest.approx(np.nanstd(x), rel=1e-6)
    assert train.inputs[0].mean == pytest.approx(np.nanmean(x), rel=1e-12)


def test_rare_and_absent_classes_and_repeated_samples_are_named():
    x = np.arange(40.0)[:, None] / 40
    x[-1] = x[-2]
    y = np.zeros(40, int)
    y[0] = 1
    _, said = described((x, y), classes=3)
    assert [line.partition(":")[0] for line in said] == [
        "1 training samples are there more than once",
        "class 1 has 1 training samples and the largest 39",
        "no training sample is of class 2",
    ]


def test_several_inputs_and_sequences_are_described_by_their_names():
    x = {
        "image": np.arange(32, dtype=np.uint8).reshape(8, 1, 2, 2),
        "tokens": [[1, 2], [4], [], [5, 6, 9]] * 2,
    }
    x["image"][7] = x["image"][3]
    (train,), said = described((x, np.arange(8) % 2))
    assert train.forms == (
        "image of shape (1, 2, 2), uint8",
        "tokens sequences of length 0 to 3, mean 1.5, of shape (), int64",
    )
    image, tokens = train.inputs
    assert (image.name, image.most, tokens.name) == ("image channel 0", 27, "tokens")
    assert (tokens.mean, tokens.least, tokens.most) == (4.5, 1, 9)
    assert tokens.deviation == pytest.approx(np.std([1, 2, 4, 5, 6, 9]), rel=1e-12)
    # The last sample is the fourth again, with its target.
    assert (train.repeated, len(said)) == (1, 1)
    particles = [np.full((length, 2), [1, 2], np.float32) for length in (2, 3)]
    (train,), _ = described((particles, np.arange(2)))
    assert [(one.name, one.mean) for one in train.inputs] == [("input 0", 1), ("input 1", 2)]
    assert train.forms == ("sequences of length 2 to 3, mean 2.5, of shape (2,), float32",)
