"""Files that somebody else may have written are read within bounds, and shown as what they are."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

from tutti.records.untrusted import MOST_BYTES, parse_json, printable, read_file, read_tail


def test_a_file_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    assert read_file(path) == b"abc"
    assert read_tail(path, 2) == b"bc"


@pytest.mark.parametrize("read", [read_file, read_tail])
def test_a_small_file_takes_little_memory(tmp_path: Path, read: Callable[[Path, int], bytes]) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    tracemalloc.start()
    try:
        read(path, MOST_BYTES)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_pipe_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    for read in (read_file, read_tail):
        with pytest.raises(OSError, match="pipe"):
            read(path, 10)


def test_a_link_to_a_device_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "link"
    path.symlink_to("/dev/zero")
    with pytest.raises(OSError, match="device"):
        read_file(path)


def test_a_file_that_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.touch()
    os.truncate(path, MOST_BYTES + 1)
    with pytest.raises(OSError, match=f"{MOST_BYTES + 1:,}"):
        read_file(path)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "", "{", b"\xff", "1" * 5000])
def test_what_is_no_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


def test_what_a_terminal_obeys_is_written_out() -> None:
    assert printable("a\x1b[31mb\x07\x9b\u202e\n") == "a\\x1b[31mb\\x07\\x9b\\u202e\\n"
    assert printable("two\nlines\x1b", lines=True) == "two\nlines\\x1b"
    assert printable("größe 音 \u200d") == "größe 音 \u200d"


def test_names_that_no_encoding_has_can_be_printed() -> None:
    assert printable(os.fsdecode(b"caf\xe9")) == "caf\\udce9"


def test_texts_in_json_are_printable() -> None:
    assert parse_json('{"a\\u001b": ["\\u001b]0;title\\u0007", 1, null]}') == {
        "a\\x1b": ["\\x1b]0;title\\x07", 1, None]
    }
