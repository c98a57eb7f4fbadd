"""`tutti train` with one worker, in this process: its output, its records, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tutti.cli.main import main
from tutti.records.run import EpochRecord, Summary
from tutti.records.run_folder import RunFolder

Run = Callable[..., tuple[int, str, str]]

SMALL = ("mlp", "--model.hidden", "16", "--epochs", "1")


@pytest.fixture
def tutti(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run commands in an empty folder with one worker; they return (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> tuple[int, str, str]:
        code = main([*words, "-n", "1", "--threads", "1"])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return run


def test_a_run_prints_plan_and_result_and_writes_its_folder(tutti: Run, tmp_path: Path) -> None:
    code, out, err = tutti("train", "mlp", "--epochs", "2", "--model.hidden", "32")
    assert (code, err) == (0, "")
    assert out.startswith("plan: 1 rank x 1 thread")
    assert "model mlp: 2,410 parameters" in out
    assert "samples of 1x8x8" in out
    assert "task: 10 classes; loss cross_entropy, metrics accuracy\n" in out
    assert "training: 2 epochs by adam, learning rate 0.001, no schedule, batch size 32\n" in out
    assert "test: 359 samples, accuracy " in out
    assert "predicted as" in out
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"run folder: runs/{folder.name}" in out
    assert folder.name.endswith("-mlp-digits")
    files = ".lock ranks config.json data.json history.csv history.jsonl starts.jsonl summary.json"
    assert {path.name for path in folder.iterdir()} == {*files.split(), "usage.jsonl", "weights.safetensors"}
    summary = RunFolder.open(folder).read(Summary)
    assert summary.test is not None
    assert summary.test.samples == 359
    assert len(RunFolder.open(folder).lines(EpochRecord).records) == 2


def test_the_configuration_of_a_run_repeats_it(tutti: Run, tmp_path: Path) -> None:
    assert tutti("train", *SMALL, "--out", "a", "--schedule", "OneCycleLR", "--lr", "0.01")[0] == 0
    config = json.loads((tmp_path / "a/config.json").read_text())
    resolved = {"strategy": "solo", "workers": "1", "threads": 1, "loss": "cross_entropy", "lr": 0.01}
    assert resolved.items() <= config.items()
    assert tutti("train", "--config", "a/config.json", "--out", "b")[0] == 0
    first, second = ((tmp_path / run / "weights.safetensors").read_bytes() for run in "ab")
    assert first == second
    assert json.loads((tmp_path / "b/config.json").read_text()) == config


def test_evaluate_scales_other_data_like_the_training_data(tutti: Run, tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (60, 8, 8), dtype=np.uint8)
    labels = np.arange(60) % 10
    np.savez(tmp_path / "all.npz", x_train=images, y_train=labels, x_test=images[:10], y_test=labels[:10])
    np.savez(tmp_path / "few.npz", x=images[:10], y=labels[:10])
    np.savez(tmp_path / "other.npz", x=images[:, :4], y=labels)
    assert tutti("train", "--data", "all.npz", *SMALL, "--out", "a")[0] == 0
    code, same, _ = tutti("evaluate", "a")
    code, other, err = tutti("evaluate", "a", "--data", "few.npz", "--part", "train")
    assert (code, err) == (0, "")
    assert same.partition(": 10 samples")[2] == other.partition(": 10 samples")[2]
    code, _, err = tutti("evaluate", "a", "--data", "other.npz")
    assert code == 2
    assert "have shape (1, 4, 8), but the model was trained on (1, 8, 8)" in err


def test_evaluate_refuses_data_without_the_part(tutti: Run, tmp_path: Path) -> None:
    inputs = np.random.default_rng(0).random((40, 3), np.float32)
    np.savez(tmp_path / "some.npz", x=inputs, y=np.arange(40) % 2)
    code, out, _ = tutti("train", "--data", "some.npz", *SMALL, "--out", "a")
    assert code == 0
    assert "test:" not in out
    code, _, err = tutti("evaluate", "a")
    assert code == 2
    assert "has no test part; it has: train, validation" in err


def test_a_column_has_the_weights_of_samples_in_training_and_evaluation(tutti: Run, tmp_path: Path) -> None:
    rows = [f"{a},{a % 3 - 1},{a * 5 % 7 / 2},{'yes' if a * 5 % 11 > 4 else 'no'}" for a in range(60)]
    (tmp_path / "data").mkdir()
    for part, some in (("train", rows[:40]), ("test", rows[40:])):
        (tmp_path / "data" / f"{part}.csv").write_text("\n".join(["a,b,heavy,label", *some]))
    run, table = str(tmp_path / "run"), str(tmp_path / "data")
    options = ("--data.weight", "heavy", "--data.prepare", "off", "--epochs", "1")
    code, shown, _ = tutti("train", "mlp", "--data", table, *options, "--out", run)
    (line,) = [line for line in shown.splitlines() if line.startswith("test:")]
    assert code == 0
    assert "cross_entropy, weighted by sample" in shown
    assert line in tutti("evaluate", run)[1].replace("test part of data:", "test:")
    test = f"{table}/test.csv"
    assert line in tutti("evaluate", run, "--data", test, "--data.weight", "heavy")[1]
    unweighted = tutti("evaluate", run, "--data", test)[1]
    assert line not in unweighted
    assert "unweighted: the training had --data.weight heavy" in unweighted
    assert tutti("predict", run, "--data", test, "--out", str(tmp_path / "out.csv"))[0] == 0
    assert (tmp_path / "out.csv").read_text().splitlines()[0] == '"row","class","p(no)","p(yes)"'


def test_evaluate_and_predict_use_the_same_test_part_of_whole_groups(tutti: Run, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = [(*random.random(3).round(3), n % 20, "no" if n % 17 else "yes") for n in range(200)]
    lines = "".join(",".join(map(str, row)) + "\n" for row in rows)
    (tmp_path / "churn.csv").write_text("a,b,c,person,churn\n" + lines)
    of = ("--data", "churn.csv", "--data.target", "churn", "--data.prepare", "off")
    more = ("--test", "0.2", "--group-by", "person", "--checkpoint", "1 epoch", "--out", "a")
    code, out, _ = tutti("train", *SMALL, *of, *more)
    assert code == 0
    assert "150 train, 10 validation, 40 test samples of 3\n" in out
    assert "metrics accuracy, balanced_accuracy, auc\n" in out
    assert "class yes is rare, and 0 of its" in out.splitlines()[-1]
    (tested,) = (line.partition(": ")[2] for line in out.splitlines() if line.startswith("test: "))
    assert f"test part of churn: {tested}" in tutti("evaluate", "a")[1]
    assert tutti("predict", "a", "-o", "p.csv")[0] == 0
    numbers = [int(line.partition(",")[0]) for line in (tmp_path / "p.csv").read_text().splitlines()[1:]]
    assert len({rows[number][3] for number in numbers}) == len(numbers) / 10 == 4
    code, out, _ = tutti("train", "--resume", "a", "--epochs", "2")
    assert (code, "test: 40 samples" in out) == (0, True)
    assert "churn: 200 samples" in tutti("evaluate", "a", "--data", *of[1:])[1]


def test_floating_point_targets_are_a_regression(tutti: Run, tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((200, 3), np.float32)
    np.savez(tmp_path / "line.npz", x_train=x, y_train=x.sum(1), x_test=x, y_test=x.sum(1))
    long = ("--epochs", "20", "--lr", "0.01", "--batch-size", "20")
    code, out, _ = tutti("train", *SMALL[:3], "--data", "line.npz", *long)
    assert code == 0
    assert "task: regression of 1 number; loss mse, metrics mae, rmse, r2\n" in out
    assert "test: 200 samples, mae 0.0" in out


@pytest.mark.parametrize(
    ("words", "kind"),
    [
        ("flags.npz", "3 labels of 0 or 1; loss bce, metrics accuracy"),
        ("flags.npz --data.classes none --loss mse", "regression of 3 numbers; loss mse, metrics mae"),
        ("chances.npz --loss bce", "regression of 1 number; loss bce, no metrics"),
        ("whole.npz", "4 classes; loss cross_entropy"),
        ("column.npz --loss mse", "regression of 1 number"),
        ("prices.npz", "regression of 1 number; loss mse, metrics mae, rmse, r2"),
        ("ints.npz --loss bce", "4 classes; loss bce of one-hot labels, metrics accuracy"),
        ("one_of_three.npz", "3 classes; loss cross_entropy, metrics accuracy"),
        ("odd.csv", "4 classes (1, 3, 5, 7); loss cross_entropy, metrics accuracy"),
        ("odd.csv --loss mse", "regression of 1 number; loss mse, metrics mae"),
        ("flags.csv --data.target a,b", "2 labels of 0 or 1 (a, b); loss bce, metrics accuracy"),
    ],
)
def test_the_task_is_printed(tutti: Run, tmp_path: Path, words: str, kind: str) -> None:
    ambiguous(tmp_path)
    code, out, _ = tutti("train", *SMALL, "--data", *words.split())
    assert code == 0
    assert f"task: {kind}" in out


@pytest.mark.parametrize(
    ("data", "options"),
    [
        ("ranks.npz", ("--data.classes none", "--data.classes 60")),
        ("positions.npz", ("--data.classes none", "--data.classes N")),
    ],
)
def test_ambiguous_targets_are_refused_with_the_options_that_decide(
    tutti: Run, tmp_path: Path, data: str, options: tuple[str, ...]
) -> None:
    ambiguous(tmp_path)
    code, _, err = tutti("train", *SMALL, "--data", data)
    assert code == 2
    assert all(option in err for option in options)


def ambiguous(tmp_path: Path) -> None:
    """Write data sets with targets that have several meanings."""
    random = np.random.default_rng(0)
    x, labels = random.random((60, 3), np.float32), np.arange(60) % 4
    np.savez(tmp_path / "flags.npz", x=x, y=(x > 0.5).astype(np.int64))
    np.savez(tmp_path / "one_of_three.npz", x=x, y=np.eye(3)[np.arange(60) % 3])
    np.savez(tmp_path / "chances.npz", x=x, y=x[:, 0])
    np.savez(tmp_path / "whole.npz", x=x, y=labels.astype(np.float64))
    np.savez(tmp_path / "column.npz", x=x, y=labels.astype(np.float32)[:, None])
    np.savez(tmp_path / "ints.npz", x=x, y=labels)
    np.savez(tmp_path / "prices.npz", x=x, y=np.arange(60) * 5)
    np.savez(tmp_path / "ranks.npz", x=x, y=np.arange(60))
    np.savez(tmp_path / "positions.npz", x=x, y=np.stack([labels, labels], 1))
    rows = [
        f"{a},{int(a > 0.5)},{int(b > 0.5)},{2 * label + 1}"
        for (a, b, _), label in zip(x, labels, strict=True)
    ]
    (tmp_path / "odd.csv").write_text("x,a,b,y\n" + "\n".join(rows))
    (tmp_path / "flags.csv").write_text("x,a,b,c\n" + "\n".join(rows))


def test_every_position_may_have_a_label(tutti: Run, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    tokens, lengths = random.integers(1, 5, (50, 6)), random.integers(1, 7, 50)
    labels = np.where(np.arange(6) < lengths[:, None], (tokens + 1) % 4, -100)
    np.savez(tmp_path / "text.npz", x_train=tokens, y_train=labels, x_test=tokens, y_test=labels)
    (tmp_path / "tagger.py").write_text(
        "from torch import nn\n"
        "class Swap(nn.Module):\n"
        "    def forward(self, x): return x.movedim(-1, 1)\n"
        "def tagger(): return nn.Sequential(nn.Embedding(5, 4), Swap())\n"
    )
    words = ("tagger.py:tagger", "--data", "text.npz", "--epochs", "30", "--lr", "0.1")
    code, out, _ = tutti("train", *words, "--data.classes", "4")
    assert code == 0
    assert "task: 4 classes; loss cross_entropy, metrics accuracy" in out
    assert "test: 50 samples, accuracy 100.00%" in out
    (folder,) = (tmp_path / "runs").iterdir()
    test = RunFolder.open(folder).read(Summary).test
    assert test is not None
    assert test.confusion is not None
    assert sum(map(sum, test.confusion)) == lengths.sum()
    code, _, err = tutti("train", *words)
    assert code == 2
    assert "give --data.classes N if every position has a label" in err


def test_without_a_validation_part_the_monitored_figure_is_named(tutti: Run) -> None:
    _, out, _ = tutti("train", "--data", "digits", "--validation", "0", "--patience", "1", *SMALL)
    assert "monitor: training loss, as no samples are kept for validation" in out


def test_the_length_of_a_run_shorter_than_an_epoch_is_in_steps(tutti: Run) -> None:
    code, out, _ = tutti("train", *SMALL[:3], "--steps", "5")
    assert code == 0
    assert "training: 5 steps by adam" in out
    assert "\n5 steps  loss" in out
    assert "trained 5 steps (part of an epoch) on 1 rank" in out


def test_samples_without_a_label_are_counted_and_not_scored(tutti: Run, tmp_path: Path) -> None:
    x = np.random.default_rng(0).random((60, 3), np.float32)
    y = np.where(np.arange(60) % 3 == 0, -100, np.arange(60) % 2)
    np.savez(tmp_path / "gaps.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    code, out, _ = tutti("train", *SMALL, "--data", "gaps.npz")
    assert code == 0
    assert "test: 60 samples" in out
    assert "nan" not in out
    (folder,) = (tmp_path / "runs").iterdir()
    test = RunFolder.open(folder).read(Summary).test
    assert test is not None
    assert test.confusion is not None
    assert (test.samples, sum(map(sum, test.confusion))) == (60, 40)


def corrupt(tmp_path: Path) -> None:
    """Write data sets with one fault each."""
    good = np.random.default_rng(0).random((20, 3), np.float32)
    labels = np.arange(20) % 2
    (tmp_path / "empty.npz").write_bytes(b"")
    np.savez(tmp_path / "whole.npz", x=good, y=labels)
    (tmp_path / "cut.npz").write_bytes((tmp_path / "whole.npz").read_bytes()[:200])
    (tmp_path / "text.npz").write_text("hello, world")
    np.savez(tmp_path / "negative.npz", x=good, y=labels - 1)
    np.savez(tmp_path / "nan.npz", x=np.where(good > 0.99, np.nan, good) * np.float32("nan"), y=labels)
    (tmp_path / "busy").write_text("a file")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "other.txt").write_text("something")
    (tmp_path / "own_models.py").write_text(
        "from torch import nn\n"
        "def wide(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 3))\n"
        "def narrow(): return nn.Sequential(nn.Flatten(), nn.Linear(32, 10))\n"
        "def number(): return 3\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lennet", "unknown model 'lennet'; did you mean 'lenet'?"),
        ("--data mnits", "unknown data set 'mnits'; did you mean 'mnist'?"),
        ("--strategy sink", "unknown strategy 'sink'; did you mean 'sync'?"),
        ("--strategy.evry 2", "'evry'"),
        ("--optimizer adm", "unknown optimizer 'adm'; did you mean"),
        ("--optimizer.momentun 0.9 --optimizer sgd", "did you mean 'momentum'?"),
        ("--schedule OneCycel", "did you mean 'OneCycleLR'?"),
        ("--loss cross_entropi", "did you mean 'cross_entropy'?"),
        ("--metrics accurracy", "did you mean 'accuracy'?"),
        ("mlp --model.hiden 3", "did you mean 'hidden'?"),
        ("--epoch 3", "did you mean '--epochs'?"),
        ("--data whole.npy", "whole.npz"),
        ("--data empty.npz", "empty"),
        ("--data cut.npz", "cut.npz"),
        ("--data text.npz", "text.npz"),
        ("--data negative.npz", "-1"),
        ("--data nan.npz", "NaN"),
        ("--data whole.npz --data.classes 1", "label"),
        ("own_models.py:wide", "the model has 3 outputs, for the labels"),
        ("own_models.py:narrow", "cannot take a batch of shape (2, 1, 8, 8)"),
        ("own_models.py:number", "int"),
        ("own_models.py:wade", "did you mean 'wide'?"),
        ("--config busy", "cannot read the configuration"),
        ("--out busy", "busy"),
        ("--out full", "is not empty"),
        ("--device mps", "Known: cpu, cuda"),
        ("--device gpu", "did you mean 'cuda'"),
        ("--device cuda --strategy easgd", "use --strategy solo there"),
        ("--cuda-graph on", "use --device cuda"),
    ],
)
def test_bad_input_is_one_clear_message(tutti: Run, tmp_path: Path, words: str, message: str) -> None:
    corrupt(tmp_path)
    code, _, err = tutti("train", *words.split())
    assert code == 2, err
    assert err.startswith("tutti: error: ")
    assert message in err
    assert "Traceback" not in err
    assert not list((tmp_path / "runs").glob("*"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU, so nothing is refused")
def test_a_missing_gpu_is_one_clear_message(tutti: Run) -> None:
    code, _, err = tutti("train", "--device", "cuda", "--layout", "channels_last")
    assert code == 2
    assert err.startswith("tutti: error: --device is 'cuda', but torch finds no GPU here: ")
    assert err.endswith("use --device cpu\n")
    assert err.count("\n") == 1


def test_a_batch_smaller_than_the_number_of_ranks_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "-n", "3", "--batch-size", "2", "--out", str(tmp_path / "a")]) == 2
    assert "a batch of 2 samples cannot be split over 3 ranks" in capsys.readouterr().err
    assert not (tmp_path / "a").exists()


def test_a_full_disk_is_one_clear_message(tutti: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    code, _, err = tutti("train", *SMALL, "--out", "a")
    assert code == 2
    assert "No space left on device; free some space" in err
