"""Samples of cores and memory: to JSON and back, of one host and of several."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tutti.records.json_lines import append_line, decode, to_json
from tutti.records.run_folder import RunFolder
from tutti.records.usage import RankUsage, UsageRecord

RECORD = UsageRecord(
    1_700_000_000.5,
    "a",
    [98.0, 3.5],
    [RankUsage(0, 123_456_789, 99.5, "running"), RankUsage(1, None, 0.0, "gone")],
)


def test_a_sample_survives_json() -> None:
    assert decode(UsageRecord, json.loads(to_json(RECORD))) == RECORD


def test_a_line_has_the_names_that_readers_of_the_file_rely_on() -> None:
    values = json.loads(to_json(RECORD))
    assert list(values) == ["time", "host", "cores", "ranks"]
    assert values["ranks"][0] == {"rank": 0, "pss": 123_456_789, "cpu": 99.5, "state": "running"}


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


@pytest.mark.parametrize("line", ["[]", "{}", '{"time": 1, "host": "a", "cores": 3, "ranks": []}'])
def test_a_line_that_is_no_sample_is_reported(tmp_path: Path, line: str) -> None:
    RunFolder(tmp_path).usage_file().write_text(line + "\n")
    assert len(RunFolder(tmp_path).usage().damage) == 1


def test_a_run_without_samples_has_none(tmp_path: Path) -> None:
    assert RunFolder(tmp_path).usage().records == []


def test_usage_needs_neither_torch_nor_numpy_nor_psutil() -> None:
    unwanted = "{'torch', 'numpy', 'mpi4py', 'psutil'}"
    program = f"import sys, tutti.records.usage; sys.exit(bool({unwanted} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0
