"""Tests of the folder of a farm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tutti.errors import BadOption, BadRunFolder
from tutti.records.farm_folder import FarmEvent, FarmFolder, JobState
from tutti.records.folder_lock import FolderLock
from tutti.records.run import Summary, World
from tutti.records.run_folder import RunFolder, check_writable

QUESTION = {"models": ["mlp", "cnn"], "folds": 5, "group-by": None}
JOBS = {"mlp/fold-1": {"model": "mlp", "lr": 0.1}, "cnn/fold-1": {"model": "cnn", "lr": 0.1}}


def test_a_farm_is_begun_once_and_taken_up_with_the_same_plan_alone(tmp_path: Path) -> None:
    path = tmp_path / "farm"
    begun = FarmFolder.begin(path, "cv", QUESTION, JOBS)
    assert FarmFolder.open(path).plan == begun.plan
    assert begun.plan.jobs == JOBS
    with pytest.raises(BadRunFolder, match=r"is not empty; .* go on with what is in it by --resume"):
        FarmFolder.begin(path, "cv", QUESTION, JOBS)
    same = FarmFolder.begin(path, "cv", {**QUESTION, "models": ("mlp", "cnn")}, JOBS, resume=True)
    assert same.path == path
    # A newer version has an option more, which is left at none.
    newer = {name: {**one, "news": None} for name, one in JOBS.items()}
    assert FarmFolder.begin(path, "cv", QUESTION, newer, resume=True).path == path
    with pytest.raises(BadOption, match=r"another farm: folds is 3 \(was 5\); group-by is sex \(was none\)"):
        FarmFolder.begin(path, "cv", {**QUESTION, "folds": 3, "group-by": "sex"}, JOBS, resume=True)
    with pytest.raises(BadOption, match="it is of 'cv', not 'tune'"):
        FarmFolder.begin(path, "tune", QUESTION, JOBS, resume=True)
    others = {**JOBS, "cnn/fold-1": {"model": "cnn", "lr": 0.2}}
    with pytest.raises(BadOption, match="its job 'cnn/fold-1' is another, by lr"):
        FarmFolder.begin(path, "cv", QUESTION, others, resume=True)


def test_folders_of_something_else_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadRunFolder, match="does not exist, so it is no folder of a farm"):
        FarmFolder.open(tmp_path / "none")
    with pytest.raises(BadRunFolder, match=r"has no farm\.json"):
        FarmFolder.open(tmp_path)
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(BadRunFolder, match="is not empty; name another one"):
        FarmFolder.begin(tmp_path, "cv", QUESTION, resume=True)


@pytest.mark.parametrize("name", ["../else", "/tmp/else", "a//b", "", ".hidden", "a/.ranks", "a b", "a/"])
def test_names_of_jobs_stay_inside(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadOption, match="a job cannot have the name"):
        FarmFolder.begin(tmp_path / "farm", "cv", QUESTION).job(name)


def test_the_state_of_a_job_is_that_of_its_run_folder(tmp_path: Path) -> None:
    farm = FarmFolder.begin(tmp_path / "farm", "cv", QUESTION, JOBS)
    name = "mlp/fold-1"
    assert farm.state(name) is JobState.WAITING
    RunFolder(farm.job(name)).write_error("Traceback ...\nValueError: no\n")
    assert farm.state(name) is JobState.FAILED
    assert RunFolder(farm.job(name)).error() == "Traceback ...\nValueError: no\n"
    RunFolder(farm.job(name)).write_error("Traceback ...\n" + "ValueError: no" * 100_000)
    assert (RunFolder(farm.job(name)).error() or "").endswith("ValueError: no\n")
    farm.clear_error(name)
    assert RunFolder(farm.job(name)).error() is None
    # What a job has left there does not keep a run from beginning.
    check_writable(farm.job(name))
    with FolderLock(farm.job(name)):
        assert farm.state(name) is JobState.RUNNING
    run = RunFolder.create(farm.job(name), "mlp", "digits")
    (run.path / "checkpoints" / "step-00000001").mkdir(parents=True)
    (run.path / "checkpoints" / "step-00000001" / "manifest.json").write_text("{}")
    assert farm.state(name) is JobState.STOPPED
    run.write(Summary(None, None, 0, 1, 1, 1, 1.0, 1.0, World(), {}, ""))
    assert farm.state(name) is JobState.FINISHED
    assert farm.state("cnn/fold-1") is JobState.WAITING


def test_events_of_all_launches_are_read_in_order_with_blocks_that_differ(tmp_path: Path) -> None:
    farm = FarmFolder.begin(tmp_path / "farm", "cv", QUESTION)
    assert farm.events().records == []
    with farm.launch() as killed:
        pass
    with farm.launch() as first, farm.launch() as second:
        events = [
            (killed, FarmEvent(0.5, "began", "c", 0), 0),
            (first, FarmEvent(1.0, "began", "a", 0), 1),
            (second, FarmEvent(2.0, "began", "b", 0), 2),
            (first, FarmEvent(2.5, "ended", "a", 0, "failed", 1.5, "killed"), 1),
            (first, FarmEvent(3.0, "began", "c", 0), 1),
            (second, FarmEvent(3.5, "ended", "b", 0, "finished", 1.5), 2),
        ]
        for launch, event, _ in events:
            launch.note(replace(event, launch=launch.name))
        expected = [replace(event, launch=launch.name, block=block) for launch, event, block in events]
        assert farm.events().records == expected
