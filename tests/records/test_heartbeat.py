"""Signs of life: written whole, read whole, and what becomes of those that cannot be read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tutti.records.heartbeat import TRAINING, Heartbeat
from tutti.records.run_folder import RunFolder

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


@pytest.mark.parametrize("text", ["", '{"rank": 1, "ho', "[]", "{}"])
def test_a_sign_that_is_cut_off_is_left_out_and_reported(run: Path, text: str) -> None:
    RunFolder(run).write_heartbeat(BEAT)
    path = run / "ranks" / "0.json"
    path.write_text(text)
    found = RunFolder(run).heartbeats()
    assert found.records == [BEAT]
    assert len(found.damage) == 1
    assert str(path) in found.damage[0]
