"""Records of a run that is under way: heartbeats of its ranks, samples of its hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tutti.records.heartbeat import TRAINING, Heartbeat
from tutti.records.json_lines import append_line
from tutti.records.run_folder import RunFolder
from tutti.records.usage import RankUsage, UsageRecord

BEAT = Heartbeat(
    rank=1,
    host="a",
    process=4711,
    time=1_700_000_000.5,
    state=TRAINING,
    began=1_699_999_000.0,
    moved=1_700_000_000.25,
    epoch=2,
    step=40,
    updates=100,
    per_epoch=25,
    steps_per_s=10.5,
    samples_per_s=336.0,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "ranks").mkdir()
    return tmp_path


def test_the_newest_sign_of_each_rank_is_read_in_the_order_of_ranks(run: Path) -> None:
    for rank in (10, 2):
        RunFolder(run).write_heartbeat(replace(BEAT, rank=rank))
    RunFolder(run).write_heartbeat(replace(BEAT, rank=10, step=41))
    beats = RunFolder(run).heartbeats().records
    assert [(beat.rank, beat.step) for beat in beats] == [(2, 40), (10, 41)]


@pytest.mark.parametrize("text", ['{"rank": 1, "ho', "[]", "{}"])
def test_a_sign_that_is_cut_off_is_left_out_and_reported(run: Path, text: str) -> None:
    RunFolder(run).write_heartbeat(BEAT)
    path = run / "ranks" / "0.json"
    path.write_text(text)
    found = RunFolder(run).heartbeats()
    assert found.records == [BEAT]
    assert len(found.damage) == 1
    assert str(path) in found.damage[0]


def test_the_samples_of_all_hosts_come_in_the_order_of_time(tmp_path: Path) -> None:
    ranks = [RankUsage(0, 123_456_789, 99.5, "running"), RankUsage(1, None, 0.0, "gone")]
    for time, host in ((1.0, None), (3.0, None), (2.0, "b"), (4.0, "c")):
        append_line(RunFolder(tmp_path).usage_file(host), UsageRecord(time, host or "a", [98.0], ranks))
    found = RunFolder(tmp_path).usage()
    assert [(one.time, one.host) for one in found.records] == [(1.0, "a"), (2.0, "b"), (3.0, "a"), (4.0, "c")]
    assert (found.records[0].ranks, found.damage) == (ranks, [])
