"""The line about long reading."""

from __future__ import annotations

from pathlib import Path
from threading import Event

import pytest

from tutti.data import progress


@pytest.mark.parametrize("name", ["t.csv", "."])
def test_long_reading_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (tmp_path / "t.csv").write_bytes(bytes(4_000_000))
    said, over = list[str](), Event()

    def say(text: str) -> None:
        said.append(text)
        over.set()

    monkeypatch.setattr(progress, "LONG_S", 0.0)
    monkeypatch.setattr(progress, "say_on_stderr", say)
    with progress.reading_shown(str(tmp_path / name)):
        assert over.wait(60)
    assert said == ["reading t.csv, 4 MB" if name == "t.csv" else f"reading {tmp_path.name}"]
