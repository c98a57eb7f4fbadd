"""Which of several failures is the cause, and what is said about it."""

from __future__ import annotations

import signal
from dataclasses import replace

import pytest

from tutti.errors import BadModel, PeerLost, RankFailed, TuttiError, UserError
from tutti.launch.exit_reports import Death, Report, failure, first_failure


class OwnError(UserError):
    """A user error that cannot be made from its message alone, so that pickle cannot bring it back."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(f"{one} and {two}")


def report(rank: int, error: Exception, at: float) -> Report:
    return replace(failure(rank, error, error.__traceback__), at=at)


def the_cause(reports: list[Report], deaths: list[Death] | None = None) -> TuttiError:
    error, _ = first_failure(reports, deaths or [])
    assert error is not None
    return error


def test_the_first_exception_is_the_cause() -> None:
    error = the_cause([report(0, ValueError("later"), 2.0), report(3, KeyError("first"), 1.0)])
    assert isinstance(error, RankFailed)
    assert (error.rank, "KeyError: 'first'" in error.traceback) == (3, True)


def test_a_lost_peer_is_a_consequence_of_a_later_report() -> None:
    error = the_cause([report(0, PeerLost([1]), 1.0), report(1, BadModel("no output"), 2.0)])
    assert type(error) is BadModel
    assert str(error) == "no output"


def test_as_long_as_only_losses_are_known_the_cause_is_uncertain() -> None:
    lost = report(0, PeerLost([1], "left"), 1.0)
    assert [type(error) for error in (the_cause([lost]),)] == [PeerLost]
    assert first_failure([lost], [])[1] is False
    assert first_failure([lost], [Death(1, 2.0, -signal.SIGSEGV)])[1] is True
    assert first_failure([Report(0, 1.0)], []) == (None, False)


@pytest.mark.parametrize(
    "text",
    [
        "Got the following error when running the callback: PeerLost: lost rank 1: its process ended\n\nAt:",
        "[/pytorch/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4576",
        "[/pytorch/gloo/gloo/transport/tcp/pair.cc:537] Read error [::1]:73: Connection reset by peer",
    ],
)
def test_a_torch_error_about_a_lost_peer_is_a_consequence_of_its_death(text: str) -> None:
    error = the_cause([report(0, RuntimeError(text), 1.0)], [Death(1, 2.0, -signal.SIGSEGV)])
    assert isinstance(error, PeerLost)
    assert (error.ranks, error.why) == ([1], "killed by signal 11 (SIGSEGV)")
    alone = the_cause([report(0, RuntimeError(text), 1.0)])
    assert isinstance(alone, RankFailed)
    assert text in alone.traceback


def test_all_dead_ranks_are_named_with_what_happened_to_the_first() -> None:
    deaths = [Death(2, 1.0, -signal.SIGSEGV), Death(0, 2.0, 1)]
    error = the_cause([report(1, PeerLost([2]), 1.5)], deaths)
    assert isinstance(error, PeerLost)
    assert error.ranks == [0, 2]
    assert error.why == "killed by signal 11 (SIGSEGV)"


@pytest.mark.parametrize(
    ("death", "why"),
    [
        (Death(0, 0.0, 3), "exited with code 3 before it was done"),
        (Death(0, 0.0, 3, after=True), "exited with code 3 after it was done"),
        (Death(0, 0.0, -7), "killed by signal 7 (SIGBUS); a file that it had mapped into memory was cut off"),
        (Death(0, 0.0, -9), "killed by signal 9 (SIGKILL); if no user sent it, the memory may have run out"),
        (Death(0, 0.0, -40), "killed by signal 40"),
        (Death(0, 0.0, None), "it ended before it was done"),
    ],
)
def test_a_death_is_explained(death: Death, why: str) -> None:
    assert death.why().startswith(why)


def test_a_user_error_that_cannot_be_sent_keeps_its_message() -> None:
    error = the_cause([report(0, OwnError("this", "that"), 1.0)])
    assert type(error) is UserError
    assert str(error) == "this and that"


def test_a_thread_that_could_not_be_started_is_named_by_the_limit() -> None:
    report = failure(0, RuntimeError("can't start new thread"), None)
    error, certain = first_failure([report], [])
    assert certain
    assert isinstance(error, UserError)
    assert str(error).startswith("no further process can be started: raise the limit of this user (ulimit -u")
