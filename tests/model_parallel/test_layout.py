"""Words such as data=2,tensor=2 become a layout, or one clear error."""

from __future__ import annotations

from typing import Any

import pytest

from tutti.cli.main import main
from tutti.errors import BadOption, UnknownName, UserError
from tutti.model_parallel.layout import parse_layout, ranks_of


@pytest.mark.parametrize(
    ("text", "ranks", "team", "data", "known"),
    [
        ("tensor", 3, 3, 1, None),
        ("pipeline=2", 2, 2, 1, 2),
        ("tensor = 2, data = 3", 6, 2, 3, 6),
        ("data,sharded=2", 8, 2, 4, None),
        ("data=2,sharded", 8, 4, 2, None),
    ],
)
def test_a_number_that_is_left_out_follows_from_the_others(
    text: str, ranks: int, team: int, data: int, known: int | None
) -> None:
    layout = parse_layout(text, {}, ranks)
    assert (layout.team, layout.data, layout.ranks) == (team, data, ranks)
    assert ranks_of(text) == known


@pytest.mark.parametrize(
    ("text", "ranks", "options", "error", "message"),
    [
        ("tensr", 2, {}, UnknownName, "'tensor'"),
        ("tensor=x", 2, {}, BadOption, "tensor=x"),
        ("tensor=0", 2, {}, BadOption, "tensor=0"),
        ("tensor=3", 4, {}, BadOption, "-n 3"),
        ("data=2,tensor=2", 6, {}, BadOption, "-n 4"),
        ("data=8,tensor", 4, {}, BadOption, "there are 4"),
        ("data,tensor", 4, {}, BadOption, "leaves both numbers open"),
        ("data=2", 2, {}, BadOption, "tensor"),
        ("tensor=2,pipeline=2", 4, {}, BadOption, "tensor and pipeline"),
        ("tensor", 1, {}, BadOption, "-n 2"),
        ("pipeline", 2, {"schedule": "1f2b"}, UnknownName, "'1f1b'"),
        ("pipeline", 2, {"microbatches": 0}, BadOption, "microbatches is 0"),
        ("pipeline", 2, {"microbatchs": 2}, UnknownName, "'microbatches'"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(
    text: str, ranks: int, options: dict[str, Any], error: type[UserError], message: str
) -> None:
    with pytest.raises(error, match=message):
        parse_layout(text, options, ranks)


def test_options_go_to_their_way() -> None:
    found = parse_layout("pipeline", {"schedule": "gpipe", "microbatches": 3}, 2)
    assert (found.schedule, found.microbatches) == ("gpipe", 3)


@pytest.mark.parametrize(
    ("words", "option"),
    [
        ("--parallel.microbatches 2", "--parallel"),
        ("--parallel tensor=2 -n 3", "-n 2"),
        ("--parallel tensor=2 --servers 1", "--parallel"),
        ("--parallel tensor=2 --balance speed", "--parallel"),
        ("--parallel tensor=2 --device cuda", "--device cuda"),
    ],
)
def test_the_command_line_refuses_before_any_rank_starts(
    capsys: pytest.CaptureFixture[str], words: str, option: str
) -> None:
    assert main(["train", "mlp", *words.split()]) == 2
    shown = capsys.readouterr()
    assert option in shown.err
    assert "plan:" not in shown.out
