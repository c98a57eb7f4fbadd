"""Output that cannot be written is one message; where there is no room, no run begins."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

import pytest

from tests.preloaded import command
from tutti.cli.main import main
from tutti.tables import TextTable
from tutti.terminal import console_on

TRAIN = "train mlp --model.hidden 8 --epochs 1 --out run"


def shell(folder: Path, line: str) -> subprocess.CompletedProcess[str]:
    """Run a line of the shell; what is not redirected there is captured."""
    return subprocess.run(["bash", "-c", line], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("{tutti} --help > /dev/full", 2, "No space left on device"),
        ("{tutti} --help | true; exit ${{PIPESTATUS[0]}}", 141, ""),
        ("PYTHONIOENCODING=ascii {tutti} {train} -n 1", 0, ""),
        ("ulimit -f 100; {python} -m tutti {train} -n 2", 2, "ulimit -f unlimited"),
    ],
)
def test_output_that_cannot_be_written_is_one_message_and_an_exit_code(
    tmp_path: Path, line: str, code: int, said: str
) -> None:
    done = shell(tmp_path, line.format(tutti=" ".join(command()), train=TRAIN, python=sys.executable))
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_an_error_does_not_drive_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["evaluate", "\x1b[31mred"]) == 2
    error = capsys.readouterr().err
    assert "\x1b" not in error
    assert "\\x1b[31mred" in error


def test_a_table_is_one_line_for_each_row_in_a_pipe_and_fits_a_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    table = TextTable(("name", "figure", "remark"), left=["remark"], title="scores")
    table.add_row("one " * 50, "0.9876", "the best")
    table.add_row("\x1b[2J[bold]mlp", "0.9123", "")
    pipe, terminal = io.StringIO(), Terminal()
    console_on(pipe).print(table)
    first, heads, one, other = pipe.getvalue().splitlines()
    assert (first, heads.split()) == ("scores", ["name", "figure", "remark"])
    assert one.split()[-3:] == ["0.9876", "the", "best"]
    assert other.split() == ["\\x1b[2J[bold]mlp", "0.9123", "-"]
    monkeypatch.setenv("COLUMNS", "40")
    console_on(terminal).print(table)
    assert "0.9876" in terminal.getvalue()
    assert max(map(len, terminal.getvalue().splitlines())) <= 60
