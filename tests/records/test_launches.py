"""Launches and their claims."""

from __future__ import annotations

from pathlib import Path

from tutti.records.files import make_file
from tutti.records.folder_lock import is_locked
from tutti.records.launches import Launch, all_launches


def test_a_job_is_one_launchs_as_long_as_that_lives(tmp_path: Path) -> None:
    with Launch(tmp_path) as second:
        with Launch(tmp_path) as first:
            assert first.claim("a/b")
            assert first.claim("a/b")
            assert not second.claim("a/b")
            assert second.claim("a/c")
            assert [is_locked(folder) for folder in all_launches(tmp_path)] == [True, True]
            first.release("a/b")
            assert second.claim("a/b")
            second.release("a/b")
            assert first.claim("a/b")
        assert second.claim("a/b")
        assert sorted(map(is_locked, all_launches(tmp_path))) == [False, True]


def test_a_file_is_made_once(tmp_path: Path) -> None:
    assert make_file(tmp_path / "file", b"first")
    assert not make_file(tmp_path / "file", b"second")
    assert [(one.name, one.read_bytes()) for one in tmp_path.iterdir()] == [("file", b"first")]
