"""A dry run says what the run would be, and about how much memory it would take; it makes none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tutti.cli.main import main
from tutti.records.run_folder import RunFolder

LARGE = ("train", "mlp", "--model.hidden", "4096,4096", "--optimizer", "adam", "-n", "2", "--threads", "1")
"""A model whose memory is most of its run's: what Python and torch take depends on who else has them open."""


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[dict[str, float], dict[str, object]]:
    """The megabytes of each kind of memory, and the configuration."""
    assert main([*words, "--dry-run"]) == 0
    said, _, config = capsys.readouterr().out.partition("configuration:\n")
    rows = [line.rsplit(maxsplit=2) for line in said.splitlines() if line.endswith(" MB")]
    return {name.strip(): float(number.replace(",", "")) for name, number, _ in rows}, json.loads(config)


def test_a_dry_run_fills_in_what_was_left_open_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, config = dry_run(capsys, "train", "mlp", "-n", "2", "--threads", "1", "--lr", "0.5")
    wanted = {"strategy": "sync", "workers": "2", "lr": 0.5, "loss": "cross_entropy", "epochs": 20}
    assert wanted.items() <= config.items()
    assert [*tmp_path.iterdir()] == []


def test_its_memory_is_that_of_a_run_but_for_a_factor_of_two(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    expected, _ = dry_run(capsys, *LARGE)
    assert main([*LARGE, "--steps", "4", "--out", "run"]) == 0
    samples = RunFolder(tmp_path / "run").usage().records
    measured = max(sum(rank.pss or 0 for rank in one.ranks) for one in samples) / 1e6
    assert 0.5 < expected["in all"] / measured < 2


def test_weights_that_ranks_share_count_once_and_those_of_each_for_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shared, _ = dry_run(capsys, *LARGE)
    private, _ = dry_run(capsys, *LARGE, "--strategy", "local")
    parameters = 64 * 4096 + 4096 + 4096 * 4096 + 4096 + 4096 * 10 + 10
    assert shared["weights"] == pytest.approx(4e-6 * parameters, abs=0.1)
    assert private["weights"] == pytest.approx(8e-6 * parameters, abs=0.1)
    assert shared["gradients"] == private["gradients"] == pytest.approx(8e-6 * parameters, abs=0.1)
    assert shared["optimizer state"] == pytest.approx(8e-6 * parameters, abs=0.1)
    assert private["optimizer state"] == pytest.approx(16e-6 * parameters, abs=0.1)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plan", "auto"], "--dry-run starts no rank"),
        (["--strategy", "gem", "--servers", "9", "-n", "1", "--parallel", "tensor"], "--servers"),
        (["--optimizer", "nosuch"], "nosuch"),
        (["--schedule", "one_cycle", "--schedule.nosuch", "3"], "nosuch"),
        (["--weights", "nothere"], "nothere does not exist"),
        (["--predictions", "--validation", "0"], "--predictions is for the validation part"),
        (["--augment", "nosuch"], "nosuch"),
        (["--monitor", "val_loss", "--validation", "0"], "--monitor"),
    ],
)
def test_what_a_run_would_be_refused_for_a_dry_run_is_refused_for(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "mlp", "--dry-run", *words]) == 2
    assert said in capsys.readouterr().err


def test_data_that_stay_in_files_count_by_their_windows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    numbers = np.random.default_rng(0)
    np.save(folder / "train_inputs.npy", numbers.random((4096, 1024), np.float32))
    np.save(folder / "train_targets.npy", numbers.integers(0, 3, 4096))
    options = ["--data", str(folder), "--data.buffer", "2", "-n", "2", "--validation", "0"]
    streamed, _ = dry_run(capsys, "train", "mlp", *options, "--data.stream", "true")
    whole, _ = dry_run(capsys, "train", "mlp", *options[:2], "--data.stream", "false")
    assert streamed["data, once for all"] < 3
    assert whole["data, once for all"] > 16
