"""Terminals and logs show that a file is read."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest

from tutti.data.schemas import reading_shown


class Screen(StringIO):
    def isatty(self) -> bool:
        return True


def test_long_reading_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.csv").write_bytes(bytes(4_000_000))
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    monkeypatch.setattr("tutti.terminal._SHOWN_AFTER_S", 0.0)
    monkeypatch.setattr("sys.stderr", screen := Screen())
    line = "\rreading t.csv, 4 MB"
    with reading_shown(tmp_path / "t.csv"):
        while screen.getvalue() != line:
            pass
    assert screen.getvalue() == f"{line}\r{' ' * len(line[1:])}\r"


def test_a_log_has_a_line_of_long_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.csv").write_bytes(bytes(4_000_000))
    monkeypatch.setattr("tutti.data.schemas.LOGGED_AFTER_S", 0.0)
    monkeypatch.setattr("sys.stderr", log := StringIO())
    with reading_shown(tmp_path / "t.csv"):
        while not log.getvalue().endswith("\n"):
            pass
    assert log.getvalue() == "tutti: reading t.csv, 4 MB\n"
