"""The progress of long reading."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import IO

import pytest

from tutti.data.progress import show_reading


class Screen(StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.isatty = lambda: terminal


class Reading:
    """Reads some of a file between two looks, and is over with its end."""

    def __init__(self, file: IO[bytes], step: int) -> None:
        self._file, self._step = file, step

    def wait(self, timeout: float) -> bool:
        return not self._file.read(self._step)


@pytest.mark.parametrize(
    ("terminal", "said"),
    [
        (False, ["tutti: reading t.csv, 4 MB"]),
        (True, ["", "reading t.csv, 4 MB: 50%", "reading t.csv, 4 MB: 100%", " " * 25, ""]),
    ],
)
def test_long_reading_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool, said: list[str]
) -> None:
    (tmp_path / "t.csv").write_bytes(bytes(4_000_000))
    screen = Screen(terminal)
    monkeypatch.delenv("OMPI_COMM_WORLD_RANK", raising=False)
    monkeypatch.setattr("sys.stderr", screen)
    with (tmp_path / "t.csv").open("rb", buffering=0) as file:
        show_reading(tmp_path / "t.csv", Reading(file, 2_000_000))
    assert [line.rstrip() if line.strip() else line for line in screen.getvalue().split("\r")] == said
