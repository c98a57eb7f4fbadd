"""The tables of a comparison can be read on terminals of any width, and by programs."""

from __future__ import annotations

import io
import re
from dataclasses import replace

import pytest

from tutti.records.comparison import STRONG, Combination, Comparison
from tutti.reports.results import Results
from tutti.reports.scaling import Row
from tutti.reports.text import cells, heads, other_metrics, show

LONG = "batch_size 64, lr 0.003, strategy.compression topk, strategy.every 10"


class Terminal(io.StringIO):
    """Text that a terminal would show."""

    def isatty(self) -> bool:
        return True


def results(names: list[str], repeats: int = 3, target: float | None = 0.97) -> Results:
    rows = []
    for number, name in enumerate(names):
        seconds = 1234.56 + 10 * number
        one = Combination(name, f"f{number}", "sync", 2, 1, STRONG)
        row = Row(
            combination=one,
            seconds=seconds,
            spread=(seconds - 1, seconds + 1),
            finished=repeats,
            samples_per_s=12345.0,
            speed_up=1.25 + number,
            speed_up_all=0.75 + number,
            efficiency=0.625,
            accuracy=0.9876,
            metrics={},
            to_target=765.43,
            error=None,
        )
        rows.append(row)
    comparison = Comparison("lenet", "mnist", repeats, target, tuple(row.combination for row in rows))
    made = Results(comparison, {row.combination.folder: [] for row in rows})
    made.__dict__["rows"] = tuple(rows)
    return made


def on_terminal(found: Results, width: int, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(width))
    stream = Terminal()
    show(found, stream)
    return re.sub(r"\x1b\[[\d;]*m", "", stream.getvalue()).splitlines()


NAMES = {
    "one": ["solo, 1 thread"],
    "four": ["solo, 1 thread", "solo, 2 threads", "sync, 2 workers", "hogwild, 2 workers"],
    "twelve": [f"strategy{number}, 2 workers" for number in range(12)],
    "ten, with long ones": [
        *(f"strategy{number}, 2 workers" for number in range(8)),
        *(f"{name}, 2 workers, {LONG}" for name in ("easgd_sync", "paramserver")),
    ],
    "four long": [f"{name}, 2 workers, {LONG}" for name in ("solo", "sync", "easgd_sync", "paramserver")],
}


@pytest.mark.parametrize("width", [60, 80, 120, 200])
@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_no_number_is_cut_and_no_line_longer_than_the_terminal(
    names: list[str], width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = on_terminal(results(names), width, monkeypatch)
    assert max(map(len, lines)) <= width
    for number, name in enumerate(names):
        (words,) = [line.split() for line in lines if f" {1234.56 + 10 * number:.2f} " in line]
        assert {f"{1.25 + number:.2f}", "98.76", "765.43"} <= set(words)
        assert words[0] == name.split()[0]
    assert "…" not in "".join(lines)


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_every_column_is_shown_or_named_as_left_out(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = results(NAMES["four"])
    lines = on_terminal(found, width, monkeypatch)
    begin = next((number for number, line in enumerate(lines) if "no room here" in line), len(lines))
    left_out = " ".join(lines[begin:]).partition("shows all")[0]
    shown = " ".join(line for line in lines if "98.76" in line)
    values = {"shortest, longest": "1233.56,", "samples/s": "12,345", "of all threads": "0.75"}
    values |= {"efficiency": "62%"}
    for head, value in values.items():
        assert (value in shown) != (head in left_out)
    assert (begin < len(lines)) == (width < 100)


def test_a_pipe_gets_one_line_for_each_row_with_all_columns_and_no_lines_of_dashes() -> None:
    stream = io.StringIO()
    show(results(NAMES["four long"]), stream)
    lines = stream.getvalue().splitlines()
    assert lines == [line.rstrip() for line in lines]
    assert lines[1].split("  ")[0] == heads(results([]).comparison, "test")[0]
    for number, name in enumerate(NAMES["four long"]):
        (line,) = [line for line in lines if line.startswith(f"{name} ")]
        assert line.removeprefix(name).split() == [
            *(
                "2",
                f"{1234.56 + 10 * number:.2f}",
                f"{1233.56 + 10 * number:.2f},",
                f"{1235.56 + 10 * number:.2f}",
            ),
            *("12,345", f"{1.25 + number:.2f}", f"{0.75 + number:.2f}", "62%", "98.76", "765.43"),
        ]
    assert not set("─━│…") & set(stream.getvalue())


def with_failures(names: list[str], failed: set[int]) -> Results:
    """Results of which some rows have no runs that ended."""
    found = results(names)
    none = {"seconds": None, "spread": None, "samples_per_s": None, "speed_up": None, "speed_up_all": None}
    none |= {"efficiency": None, "accuracy": None, "to_target": None}
    found.__dict__["rows"] = tuple(
        replace(
            row, finished=0, error="rank 1 failed:\nTraceback ...\nValueError: a reason of its own", **none
        )
        if number in failed
        else row
        for number, row in enumerate(found.rows)
    )
    return found


@pytest.mark.parametrize("width", [40, 60, 80, 120, 200])
def test_failed_ways_are_in_the_table_and_explained_below_it(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = on_terminal(with_failures(NAMES["twelve"], {3, 11}), width, monkeypatch)
    assert max(map(len, lines)) <= width
    text = " ".join(" ".join(lines).split())
    for number in (3, 11):
        (row,) = [line for line in lines if line.startswith(f"strategy{number}, ") and "-" in line]
        assert not any(word.replace(".", "").isdecimal() for word in row.split("-", 1)[1].split())
        assert f"strategy{number}, 2 workers failed: ValueError: a reason of its own" in text


def test_a_pipe_gets_as_many_words_for_a_way_that_failed() -> None:
    stream = io.StringIO()
    show(with_failures(NAMES["twelve"], {3, 11}), stream)
    lines = stream.getvalue().splitlines()
    assert lines == [line.rstrip() for line in lines]
    for number in (3, 11):
        (line,) = [line for line in lines if line.startswith(f"strategy{number}, 2 workers (0 of 3 runs) ")]
        assert line.split("runs) ")[1].split() == ["2", *["-"] * 8]


def test_a_terminal_too_narrow_for_all_numbers_still_shows_ways_seconds_and_speed_ups(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = on_terminal(results(NAMES["twelve"]), 40, monkeypatch)
    assert max(map(len, lines)) <= 40
    for number in range(12):
        (row,) = [line.split() for line in lines if f" {1234.56 + 10 * number:.2f} " in line]
        assert row[0] == f"strategy{number},"
        assert f"{1.25 + number:.2f}" in row


def test_other_metrics_have_columns_of_their_own() -> None:
    found = results(["solo, 1 thread", "sync, 2 workers"])
    first, second = found.rows
    rows = [replace(first, metrics={"f1": 0.51234, "top3": 0.98765}), replace(second, metrics={"f1": 0.25})]
    names = other_metrics(rows)
    heads_of = heads(found.comparison, found.part, names)
    assert heads_of[-3:] == ["f1", "top3", "seconds to 97 %"]
    assert [cells(found.comparison, row, names)[-3:-1] for row in rows] == [
        ["0.5123", "98.77%"],
        ["0.25", ""],
    ]
