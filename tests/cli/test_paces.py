"""`tutti train` with asynchronous strategies: its output, its records, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest

from tutti.cli.main import main
from tutti.records.run import EpochRecord
from tutti.records.run_folder import RunFolder

SMALL = ("--model.hidden", "16", "--epochs", "4", "--lr", "0.01", "--batch-size", "128")


def test_a_run_with_a_queue_and_background_validation(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["train", *SMALL, "--strategy", "downpour", "--balance", "queue", "--validate", "background"]
    assert main([*words, "-n", "2", "--out", str(tmp_path / "run")]) == 0
    said = capfd.readouterr().out
    assert "staleness: mean " in said
    records = RunFolder.open(tmp_path / "run").lines(EpochRecord).records
    assert [record.epoch for record in records] == [1, 2, 3, 4]
    for record in records:
        assert record.train.samples == sum(rank.samples for rank in record.ranks) == 1294
        assert sum(rank.updates for rank in record.ranks) == 11
        assert record.validation is not None
        assert record.validation.samples == 144
        for rank in record.ranks:  # A rank that begins late may get no batch.
            begun = rank.updates > 0
            assert begun == (rank.exchanges > 0) == (rank.bytes_sent > 0) == (rank.stages["forward"] > 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--strategy sync --balance queue", "--balance queue is for strategies whose workers"),
        ("--strategy sync --validate background", "leave --validate out"),
        ("--balance fast", "unknown value 'fast' of --balance"),
        ("--validate later", "unknown value 'later' of --validate"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    code = main(["train", *SMALL, "-n", "1", "--threads", "1", "--out", str(tmp_path / "a"), *words.split()])
    assert code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "a").exists()
