from tutti.errors import RankFailed, UnknownName, in_one_line


def test_a_message_in_one_line_keeps_what_happened_and_the_remedy() -> None:
    several = "no download:\n  https://a: no such name\nto go on without: set TUTTI_DATA=FOLDER"
    assert in_one_line(several) == (
        "no download: https://a: no such name to go on without: set TUTTI_DATA=FOLDER"
    )


def test_a_traceback_in_one_line_is_its_exception() -> None:
    traceback = "Traceback (most recent call last):\n  File ...\nValueError: broken"
    assert in_one_line(str(RankFailed(1, traceback))) == "ValueError: broken"


def test_a_line_has_an_end() -> None:
    assert len(in_one_line("ValueError: " + "no" * 1_000_000)) < 3000


def test_of_many_known_names_only_the_nearest_are_listed() -> None:
    message = str(UnknownName("object", "score_07", [f"score_{number}" for number in range(100)]))
    assert "did you mean 'score_7'?" in message
    assert "The nearest of 100: score_7, " in message
    assert len(message) < 250
