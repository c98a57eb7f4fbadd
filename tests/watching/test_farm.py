"""The display of a farm."""

from __future__ import annotations

import io
from pathlib import Path

from tutti.records.farm_folder import FarmEvent, FarmFolder, JobState
from tutti.records.folder_lock import FolderLock
from tutti.records.run import EpochRecord, Evaluation
from tutti.records.run_folder import RunFolder
from tutti.terminal import console_on
from tutti.watching.farm import FarmDisplay, FarmProgress, follow_farm

JOBS = {"a/fold-0": 3, "a/fold-1": 3, "b/fold-0": 3, "b/fold-1": None}


def record(epoch: int, accuracy: float, loss: float = 0.5) -> EpochRecord:
    validation = Evaluation(10, loss, {"accuracy": accuracy})
    return EpochRecord(
        epoch, epoch, True, validation, validation, {"total": 1.0, "validation": 0.1}, 1.0, 0.1, ""
    )


def ended(progress: FarmProgress, job: str, accuracy: float, seconds: float) -> None:
    progress.begin(job, 0, 0.0)
    progress.epoch(0, record(3, accuracy))
    progress.end(0, JobState.FINISHED, seconds)


def shown(progress: FarmProgress, now: float) -> str:
    stream = io.StringIO()
    console_on(stream).print(progress.screen(now))
    return stream.getvalue()


def test_the_display_has_blocks_jobs_epochs_and_the_time_left() -> None:
    progress = FarmProgress(JOBS)
    assert progress.left_s(0.0) is None
    ended(progress, "a/fold-0", 0.8, 10.0)
    ended(progress, "b/fold-0", 0.9, 30.0)
    progress.begin("a/fold-1", 0, 100.0)
    progress.begin("b/fold-1", 1, 100.0)
    progress.epoch(0, record(2, 0.7, 0.25))
    # 20 s each, of which 4 s are over, on two blocks.
    assert progress.left_s(104.0) == 16.0
    assert progress.headline(104.0) == "2 of 4 jobs done, 2 running, 0:16 left"
    text = shown(progress, 104.0)
    assert "a/fold-1" in text
    assert "2/3" in text
    assert "loss 0.2500  accuracy 70.00%" in text
    progress.end(1, JobState.FAILED, 1.0)
    assert "1 failed" in progress.headline(104.0)


def test_without_a_terminal_each_job_that_ends_is_a_line() -> None:
    progress, stream = FarmProgress(JOBS), io.StringIO()
    ended(progress, "a/fold-0", 0.8, 10.0)
    display = FarmDisplay(progress.done, stream)
    ended(progress, "b/fold-0", 0.9, 30.0)
    display.show(progress, 0.0)
    display.show(progress, 0.0)
    display.close()
    assert stream.getvalue() == "b/fold-0 finished; 2 of 4 jobs done, 0 running\n"


def test_a_killed_farm_is_shown_with_its_last_progress(tmp_path: Path) -> None:
    folder = FarmFolder.begin(tmp_path / "farm", "cv", {}, {name: {"epochs": 3} for name in JOBS})
    with folder.launch() as launch:
        for event in (
            FarmEvent(1.0, "began", "a/fold-0", 0),
            FarmEvent(2.0, "began", "a/fold-1", 1),
            FarmEvent(3.0, "ended", "a/fold-0", 0, "failed", 2.0, "no model"),
        ):
            launch.note(event)
    stream = io.StringIO()
    assert not follow_farm(folder.path, stream)
    first, second = stream.getvalue().splitlines()
    assert first == "0 of 4 jobs done, 0 running, 1 failed"
    assert "--resume" in second


def test_once_shows_how_a_farm_has_ended(tmp_path: Path) -> None:
    folder = FarmFolder.begin(tmp_path / "farm", "cv", {}, {"a": {"epochs": 3}})
    with folder.launch() as launch:
        launch.note(FarmEvent(1.0, "began", "a", 0))
        launch.note(FarmEvent(3.0, "ended", "a", 0, "finished", 2.0))
    stream = io.StringIO()
    assert follow_farm(folder.path, stream, once=True)
    first, *_, last = stream.getvalue().splitlines()
    assert first == "1 of 1 jobs done, 0 running"
    assert last == f"no process works on it; results: tutti report {folder.path}"


def test_a_job_in_its_first_epoch_is_shown(tmp_path: Path) -> None:
    folder = FarmFolder.begin(tmp_path / "farm", "cv", {}, {name: {"epochs": 3} for name in JOBS})
    folder.job("a/fold-0").mkdir(parents=True)
    stream = io.StringIO()
    with folder.launch() as launch, FolderLock(folder.job("a/fold-0")):
        launch.note(FarmEvent(1.0, "began", "a/fold-0", 0, launch=launch.name))
        assert follow_farm(folder.path, stream, once=True)
        RunFolder(folder.job("a/fold-0")).append(record(1, 0.6))
        assert follow_farm(folder.path, stream, once=True)
    before, after = stream.getvalue().split("0 of 4 jobs done, 1 running\n")[1:]
    assert "a/fold-0" in before
    assert "1/3" in after
