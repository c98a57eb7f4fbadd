"""Errors name the nearest right name, survive pickling, and tell full disks from other failures."""

from __future__ import annotations

import pickle

import pytest

from tutti.errors import (
    HostLost,
    LauncherLost,
    PeerLost,
    RankFailed,
    RankHung,
    TuttiError,
    UnknownName,
    in_one_line,
    with_remedy,
)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UnknownName("model", "lenett", ["lenet", "mlp"], "Or give a file.", "x"), "did you mean 'lenet'"),
        (PeerLost([2, 1], "killed by signal 9"), "lost ranks 1, 2: killed by signal 9"),
        (RankHung({1}), "lost rank 1"),
        (HostLost(["a"], [3], "it is gone"), "lost host a: it is gone"),
        (LauncherLost("it was killed"), "it was killed"),
        (RankFailed(1, "ValueError: broken\n"), "rank 1 failed:\nValueError: broken"),
    ],
)
def test_an_error_comes_as_it_was_from_another_process(error: TuttiError, message: str) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert message in str(error)
    if isinstance(error, PeerLost):
        more = error.adding("none is left")
        assert (type(more), more.ranks) == (type(error), error.ranks)
        assert str(more) == f"{error}; none is left" or not error.why


def test_of_many_known_names_only_the_nearest_are_listed() -> None:
    message = str(UnknownName("object", "score_07", [f"score_{number}" for number in range(100)]))
    assert "did you mean 'score_7'?" in message
    assert "The nearest of 100: score_7, " in message
    assert len(message) < 250


def test_a_message_in_one_line_keeps_what_happened_and_has_an_end() -> None:
    assert (
        in_one_line("no download:\n  https://a\nto go on: set X") == "no download: https://a to go on: set X"
    )
    traceback = "Traceback (most recent call last):\n  File ...\nValueError: broken"
    assert in_one_line(str(RankFailed(1, traceback))) == "ValueError: broken"
    assert len(in_one_line("ValueError: " + "no" * 1_000_000)) < 3000


def test_lack_of_room_is_told_from_other_errors() -> None:
    assert "weights" in str(with_remedy(OSError(28, "No space left on device", "weights")))
    assert with_remedy(FileNotFoundError(2, "No such file", "x")) is None
