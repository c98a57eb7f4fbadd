"""Texts of somebody else are safe to print; records have the user's permissions."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from tutti.records.files import replace_file
from tutti.records.json_lines import append_line
from tutti.records.texts import printable
from tutti.records.usage import UsageRecord

RECORD = UsageRecord(0.0, "here", [])


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_records_have_the_permissions_that_the_umask_leaves(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        append_line(tmp_path / "one", RECORD)
        replace_file(tmp_path / "other", b"content")
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {mode}


def test_what_a_terminal_obeys_is_written_out() -> None:
    assert printable("a\x1b[31mb\x07\x9b\u202e\n") == "a\\x1b[31mb\\x07\\x9b\\u202e\\n"
    assert printable("two\nlines\x1b", lines=True) == "two\nlines\\x1b"
    assert printable("größe 音 \u200d") == "größe 音 \u200d"
