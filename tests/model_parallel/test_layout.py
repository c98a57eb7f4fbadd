"""Words such as data=2,tensor=2 become a layout, or one clear error."""

from __future__ import annotations

from typing import Any

import pytest

from tutti.cli.main import main
from tutti.errors import BadOption, UnknownName
from tutti.model_parallel.ways import Pipeline, parse_layout, ranks_of


@pytest.mark.parametrize(
    ("text", "ranks", "team", "data"),
    [
        ("tensor", 3, 3, 1),
        ("pipeline=2", 2, 2, 1),
        ("data=2,tensor=2", 4, 2, 2),
        ("tensor = 2, data = 3", 6, 2, 3),
        ("data,sharded=2", 8, 2, 4),
        ("data=2,sharded", 8, 4, 2),
    ],
)
def test_a_number_that_is_left_out_follows_from_the_others(
    text: str, ranks: int, team: int, data: int
) -> None:
    layout = parse_layout(text, {}, ranks)
    assert (layout.team, layout.data, layout.ranks) == (team, data, ranks)


@pytest.mark.parametrize(
    ("text", "ranks", "message"),
    [
        ("tensr", 2, "unknown way 'tensr' of --parallel; did you mean 'tensor'"),
        ("tensor=x", 2, "tensor=x; give a whole number"),
        ("tensor=0", 2, "tensor=0; give a whole number"),
        ("tensor=3", 4, "3 x 1 is 3|1 x 3 is 3; use -n 3"),
        ("tensor=2", 4, "it makes 2; use -n 2, or data=2,tensor=2"),
        ("data=2,tensor=2", 6, "data=3,tensor=2"),
        ("data=2,tensor", 5, "does not fit 5 ranks"),
        ("data=8,tensor", 4, "does not fit 4 ranks"),
        ("data,tensor", 4, "leaves both numbers open"),
        ("data=2", 2, "data parallelism alone"),
        ("tensor=2,pipeline=2", 4, "tensor and pipeline; one model is shared in one way"),
        ("tensor,tensor", 4, "'tensor' twice"),
        ("tensor", 1, "nothing to share; use -n 2"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(text: str, ranks: int, message: str) -> None:
    with pytest.raises((BadOption, UnknownName), match=message):
        parse_layout(text, {}, ranks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "1f2b"}, "unknown value '1f2b' of --parallel.schedule; did you mean '1f1b'"),
        ({"microbatches": 0}, "microbatches is 0; give a whole number from 1"),
        ({"microbatchs": 2}, "did you mean 'microbatches'"),
    ],
)
def test_an_option_that_a_pipeline_does_not_have_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((BadOption, UnknownName), match=message):
        parse_layout("pipeline", options, 2)


def test_options_go_to_their_way() -> None:
    found = parse_layout("pipeline", {"schedule": "gpipe", "microbatches": 3}, 2).options
    assert found == Pipeline("gpipe", 3)


def test_the_ranks_are_known_when_every_number_is() -> None:
    assert [ranks_of(text) for text in ("tensor", "tensor=2", "data=3,tensor=2", "data,tensor=2")] == [
        None,
        2,
        6,
        None,
    ]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--parallel.microbatches 2", "no --parallel; name a way"),
        ("--parallel tensor=2 -n 3", "does not fit 3 ranks"),
        ("--parallel tensor=2 --servers 1", "leave them out, or --parallel"),
        ("--parallel tensor=2 --balance speed", "leave it or --parallel out"),
        ("--parallel tensor=2 --device cuda", "leave --device cuda out"),
    ],
)
def test_the_command_line_refuses_before_any_rank_starts(
    capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert main(["train", "mlp", *words.split()]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert "plan:" not in shown.out
