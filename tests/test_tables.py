"""Tables fit the terminal, name what they leave out, and are plain text elsewhere."""

from __future__ import annotations

import io
import re

import pytest

from tutti.tables import FittingTable
from tutti.terminal import console_on

HEADS = ("name", "figure", "deviation", "remark", "seconds each")


class Terminal(io.StringIO):
    """Text that a terminal would show."""

    def isatty(self) -> bool:
        return True


def table(name: str = "lenet, one_cycle", title: str = "") -> FittingTable:
    made = FittingTable(HEADS, keep=["figure"], first_to_go=["deviation"], left=["remark"], title=title)
    made.add_row(name, "0.9876", "0.0012", "the best", "12.50")
    made.add_row("mlp", "0.9123", "", "", "2.50")
    return made


def on_terminal(made: FittingTable, width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = Terminal()
    console_on(stream).print(made)
    return re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue()).splitlines()


@pytest.mark.parametrize(
    ("width", "left_out"),
    [
        (80, []),
        (54, ["deviation"]),
        (40, ["deviation", "seconds each"]),
        (26, ["deviation", "remark", "seconds each"]),
    ],
)
def test_columns_without_room_are_left_out_in_their_order_and_named(
    width: int, left_out: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = on_terminal(table(), width, monkeypatch)
    assert max(map(len, lines)) <= width
    said = (
        " ".join(line.strip() for line in lines).partition("There is no room here for: ")[2].partition(".")[0]
    )
    assert said == "; ".join(left_out)
    assert any("0.9876" in line for line in lines)


def test_a_long_name_is_folded_for_the_columns_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = on_terminal(table("a name of many words " * 6), 70, monkeypatch)
    assert max(map(len, lines)) <= 70
    assert any("0.9876" in line and "the best" in line for line in lines)


def test_a_pipe_gets_a_line_for_each_row_with_a_word_in_each_cell() -> None:
    stream = io.StringIO()
    console_on(stream).print(table("one " * 100, title="scores"))
    first, heads, one, other = stream.getvalue().splitlines()
    assert first == "scores"
    assert heads.split() == ["name", "figure", "deviation", "remark", "seconds", "each"]
    assert one.endswith("  0.9876     0.0012  the best         12.50")
    assert other.split() == ["mlp", "0.9123", "-", "-", "2.50"]


def test_what_a_terminal_would_obey_is_written_out() -> None:
    stream = io.StringIO()
    console_on(stream).print(table("\x1b[2J[bold]x"))
    assert "\\x1b[2J[bold]x " in stream.getvalue()
