"""Samples of cores and memory: to JSON and back, of one host and of several."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tutti.records.json_lines import append_line
from tutti.records.run_folder import RunFolder
from tutti.records.usage import RankUsage, UsageRecord

RECORD = UsageRecord(
    1_700_000_000.5,
    "a",
    [98.0, 3.5],
    [RankUsage(0, 123_456_789, 99.5, "running"), RankUsage(1, None, 0.0, "gone")],
)


def test_the_samples_of_all_hosts_come_in_the_order_of_time(tmp_path: Path) -> None:
    for time, host in ((1.0, None), (3.0, None), (2.0, "b"), (4.0, "c")):
        append_line(RunFolder(tmp_path).usage_file(host), replace(RECORD, time=time, host=host or "a"))
    found = RunFolder(tmp_path).usage()
    assert [(record.time, record.host) for record in found.records] == [
        (1.0, "a"), (2.0, "b"), (3.0, "a"), (4.0, "c")
    ]  # fmt: skip
    assert found.damage == []


def test_a_cut_off_sample_is_left_out_and_reported(tmp_path: Path) -> None:
    path = RunFolder(tmp_path).usage_file()
    for _ in range(2):
        append_line(path, RECORD)
    path.write_bytes(path.read_bytes()[:-20])
    found = RunFolder(tmp_path).usage()
    assert found.records == [RECORD]
    assert found.damage == [f"line 2 of {path} is cut off; it was left out"]
