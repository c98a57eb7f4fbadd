"""Reading a run folder, whole or damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.watching.seen import NOW, beat, epoch, usage, write_run
from tutti.errors import BadRunFolder
from tutti.records.json_lines import append_line
from tutti.records.run_folder import RunFolder
from tutti.watching.snapshot import Watched


def test_a_snapshot_has_all_records(tmp_path: Path) -> None:
    folder = write_run(
        tmp_path / "run", beat(0), beat(1), epochs=2, finished=True, usage=usage("running", "gone")
    )
    run = Watched(folder).read(NOW)
    assert run.beats == (beat(0), beat(1))
    assert run.history == (epoch(1), epoch(2))
    assert run.usage == (usage("running", "gone"),)
    assert run.summary is not None
    assert (run.workers, run.damage) == (2, ())


def test_truncated_records_are_left_out_and_named(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", beat(0), epochs=2, finished=True, usage=usage("running"))
    append_line(RunFolder(folder).usage_file(), usage("running", age=0.0))
    for name in ("history.jsonl", "summary.json", "ranks/0.json", "usage.jsonl"):
        path = folder / name
        path.write_bytes(path.read_bytes()[:-30])
    run = Watched(folder).read(NOW)
    assert run.history == (epoch(1),)
    assert run.usage == (usage("running"),)
    assert (run.summary, run.beats) == (None, ())
    assert len(run.damage) == 3


def test_the_newest_sample_of_a_rank_is_found(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", beat(0), usage=usage("running", age=9.0))
    append_line(RunFolder(folder).usage_file(), usage("sleeping", age=2.0))
    found = Watched(folder).read(NOW).usage_of(0)
    assert found is not None
    assert (found[0].state, found[1]) == ("sleeping", 2.0)
    assert Watched(folder).read(NOW).usage_of(1) is None


def test_another_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(BadRunFolder, match="is no folder of a run"):
        Watched(tmp_path).check()
