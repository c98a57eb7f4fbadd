from tutti.errors import RankFailed, in_one_line


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
