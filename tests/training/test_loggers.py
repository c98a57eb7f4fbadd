"""Where the figures of a run go: the files, and the real TensorBoard and MLflow."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tutti.errors import UserError
from tutti.records.json_lines import Json
from tutti.records.run import EpochRecord, Evaluation, RankRecord, Summary, World
from tutti.records.run_folder import RunFolder
from tutti.training.loggers import Logbook, Logger, figures_of, hyper_parameters, loggers_of

CONFIG: Json = {
    "model": "mlp",
    "model_options": {"hidden": [32, 16], "dropout": None},
    "lr": 0.01,
    "threads": 1,
    "epochs": 2,
    "schedule": None,
}


def record(epoch: int, loss: float = 0.5) -> EpochRecord:
    train = Evaluation(80, loss, {"accuracy": 0.75})
    times = {"validation": 0.25, "total": 1.25}
    ranks = [RankRecord(updates=10, samples=40, stages={"forward": 0.5, "wait": 0.125}) for _ in range(2)]
    return EpochRecord(epoch, 10 * epoch, True, train, train, times, 80.0, 0.01, "2026-01-02", ranks)


HISTORY = [record(1), record(2, loss=0.25)]
SUMMARY = Summary.of(HISTORY, Evaluation(20, 0.375, {"accuracy": 0.875}), 10, World(2, 1, 1))


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder.create(tmp_path / "runs" / "a", "mlp", "digits")


@pytest.fixture(autouse=True)
def no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME"):
        monkeypatch.delenv(name, raising=False)


def logged(
    folder: RunFolder, *names: str, finished: bool = True, stopped: bool = False, before: int | None = None
) -> None:
    """Log a whole run, or one that fails after its last epoch, or the rest of one that goes on."""
    try:
        with Logbook(loggers_of(folder, names), CONFIG) as book:
            if before is not None:
                book.go_on(HISTORY[:before])
            for one in HISTORY[before or 0 :]:
                book.epoch(one)
            if stopped:
                book.stop()
            elif finished:
                book.finish(SUMMARY)
            else:
                raise KeyError("on purpose")
    except KeyError:
        assert not finished


def test_every_run_folder_has_the_history_as_json_and_as_csv(folder: RunFolder) -> None:
    logged(folder)
    assert folder.lines(EpochRecord).records == HISTORY
    rows = list(csv.DictReader((folder.path / "history.csv").read_text().splitlines()))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert [float(row["train/loss"]) for row in rows] == [0.5, 0.25]
    assert [float(row["stages/wait"]) for row in rows] == [0.25, 0.25]
    assert rows[0]["time"] == "2026-01-02"
    assert not (folder.path / "tensorboard").exists()


def test_tensorboard_reads_the_figures_of_a_run(folder: RunFolder) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logged(folder, "tensorboard")
    seen = EventAccumulator(str(folder.path / "tensorboard"))
    seen.Reload()
    assert set(figures_of(HISTORY[0])) | {"test/loss", "test/accuracy"} == set(seen.Tags()["scalars"])
    assert [(point.step, point.value) for point in seen.Scalars("train/loss")] == [(10, 0.5), (20, 0.25)]
    assert [(point.step, point.value) for point in seen.Scalars("test/accuracy")] == [(20, 0.875)]
    (text,) = seen.Tensors("configuration/text_summary")
    assert b"| model_options.hidden | [32, 16] |" in text.tensor_proto.string_val[0]
    assert "_hparams_/session_start_info" in seen.summary_metadata


def runs_in(uri: str, experiment: str = "tutti") -> Iterator[Any]:
    """The runs that MLflow's own client finds."""
    from mlflow import MlflowClient

    from tutti.training.loggers.mlflow import _quiet

    with _quiet():
        client = MlflowClient(uri)
        found = client.get_experiment_by_name(experiment)
        assert found is not None
        for run in client.search_runs([found.experiment_id]):
            run.history = [
                (point.step, point.value)
                for point in client.get_metric_history(run.info.run_id, "train/loss")
            ]
            yield run


def test_mlflow_has_one_run_with_parameters_and_figures_that_a_resumed_run_goes_on_with(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Files, as a database takes seconds to make.
    store = (tmp_path / "store").as_uri()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    logged(folder, "mlflow", stopped=True)
    (run,) = runs_in(store)
    assert (run.info.run_name, run.info.status) == ("a", "KILLED")
    assert run.data.params == {name: str(value) for name, value in hyper_parameters(CONFIG).items()}
    assert run.data.metrics == figures_of(HISTORY[1])
    assert run.data.tags["tutti.run_folder"] == str(folder.path)
    # With another option; the last epoch has other figures now, and there is one more.
    monkeypatch.setitem(CONFIG, "threads", 2)
    monkeypatch.setattr(f"{__name__}.HISTORY", [HISTORY[0], record(2, loss=0.375), record(3)])
    logged(folder, "mlflow", before=1)
    (again,) = runs_in(store)
    assert (again.info.run_id, again.info.status) == (run.info.run_id, "FINISHED")
    assert again.history == [(10, 0.5), (20, 0.25), (20, 0.375), (30, 0.5)]
    assert (again.data.params["threads"], again.data.metrics["test/loss"]) == ("1", 0.375)


@pytest.mark.parametrize("before", [0, 1, 2])
def test_the_history_of_a_run_that_goes_on_is_cut_where_that_is(folder: RunFolder, before: int) -> None:
    logged(folder)
    whole, table = folder.path / "history.jsonl", folder.path / "history.csv"
    lines, rows = whole.read_bytes().splitlines(), table.read_bytes().splitlines()
    folder.begin_again()
    # It is there until the loggers know better.
    assert whole.read_bytes().splitlines() == lines
    with Logbook(loggers_of(folder, ()), CONFIG) as book:
        book.go_on(HISTORY[:before])
        assert whole.read_bytes().splitlines() == lines[:before]
        for one in HISTORY[before:]:
            book.epoch(one)
    assert whole.read_bytes().splitlines() == lines
    assert table.read_bytes().splitlines() == rows


class Failing(Logger):
    """Fails when it is told to."""

    def __init__(self, where: str) -> None:
        self.where, self.calls = where, 0

    def begin(self, config: Json) -> None:
        self._note("begin")

    def epoch(self, record: EpochRecord) -> None:
        self._note("epoch")

    def end(self, summary: Summary | None) -> None:
        self._note("end")

    def _note(self, where: str) -> None:
        self.calls += 1
        if where == self.where:
            raise ConnectionError("nobody is there")


def test_a_logger_that_cannot_begin_is_an_error() -> None:
    said = r"logger mine cannot begin \(ConnectionError: nobody is there\); .* without --log mine"
    with pytest.raises(UserError, match=said), Logbook({"mine": Failing("begin")}, CONFIG):
        pytest.fail("the run began")


@pytest.mark.parametrize("where", ["epoch", "end"])
def test_a_logger_that_fails_later_is_warned_of_once_and_the_others_go_on(
    where: str, capsys: pytest.CaptureFixture[str]
) -> None:
    failing, other = Failing(where), Failing("never")
    with Logbook({"mine": failing, "other": other}, CONFIG) as book:
        for one in HISTORY:
            book.epoch(one)
        book.finish(SUMMARY)
    said = capsys.readouterr().err
    assert said.count("warning: logger mine failed (ConnectionError: nobody is there)") == 1
    assert other.calls == 4
    assert failing.calls == (2 if where == "epoch" else 4)
