"""Records in a folder of somebody else: nothing is written through a link, a pipe or a device."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from tutti.records.files import replace_file, unfinished_file
from tutti.records.json_lines import append_line
from tutti.records.plain_files import plain_file
from tutti.records.usage import UsageRecord

RECORD = UsageRecord(0.0, "here", [])


def appended(path: Path) -> None:
    append_line(path, RECORD)


def replaced(path: Path) -> None:
    path.rename(unfinished_file(path))
    replace_file(path, b"new")


@pytest.mark.parametrize("write", [appended, replaced])
def test_a_link_in_the_place_of_a_record_is_not_followed(
    write: Callable[[Path], None], tmp_path: Path
) -> None:
    mine = tmp_path / "mine"
    mine.write_text("of the user")
    record = tmp_path / "history.jsonl"
    record.symlink_to(mine)
    with pytest.raises(OSError, match=r"symbolic links"):
        write(record)
    assert mine.read_text() == "of the user"


def test_a_pipe_in_the_place_of_a_record_holds_nothing_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError):
        plain_file(tmp_path / "pipe", os.O_WRONLY | os.O_APPEND)
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(OSError, match="no plain file"):
        plain_file(tmp_path / "pipe", os.O_WRONLY | os.O_APPEND)
    os.close(reader)


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_records_have_the_permissions_that_the_umask_leaves(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        append_line(tmp_path / "one", RECORD)
        replace_file(tmp_path / "other", b"content")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {mode}
