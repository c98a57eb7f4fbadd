"""What ranks print is handed on in whole lines, each with its rank before it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tutti.cli.main import main
from tutti.launch.output_relay import Relay

Ends = list[tuple[int, int]]


@contextmanager
def relayed(ranks: int, to: tuple[int, int]) -> Iterator[Ends]:
    """A relay at work, and the ends that the ranks would have."""
    with Relay(ranks, to) as relay:
        ends = [(os.dup(out), os.dup(err)) for out, err in relay.outputs]
        relay.start()
        yield ends
        for descriptor in (one for both in ends for one in both):
            os.close(descriptor)


def handed_on(tmp_path: Path, ranks: int, write: Callable[[Ends], None]) -> bytes:
    """What arrives in a file when ranks write so."""
    path = tmp_path / "output"
    with path.open("wb") as file, relayed(ranks, (file.fileno(), file.fileno())) as ends:
        write(ends)
    return path.read_bytes()


def test_lines_of_ranks_are_whole_and_tell_their_rank(tmp_path: Path) -> None:
    def write(ends: Ends) -> None:
        for piece in (b"a lo", b"ng li", b"ne\nand another\n"):
            for out, _ in ends:
                os.write(out, piece)

    lines = handed_on(tmp_path, 2, write).splitlines(keepends=True)
    for rank in (b"[rank 0] ", b"[rank 1] "):
        own = [line for line in lines if line.startswith(rank)]
        assert own == [rank + b"a long line\n", rank + b"and another\n"]
    assert len(lines) == 4


def test_a_last_line_without_an_end_is_not_lost(tmp_path: Path) -> None:
    def write(ends: Ends) -> None:
        os.write(ends[0][0], b"first\nlast words")

    assert handed_on(tmp_path, 1, write) == b"[rank 0] first\n[rank 0] last words\n"


def test_more_than_a_pipe_holds_passes(tmp_path: Path) -> None:
    line = b"x" * 999 + b"\n"

    def write(ends: Ends) -> None:
        for _ in range(1000):
            assert os.write(ends[0][0], line) == len(line)

    assert handed_on(tmp_path, 1, write) == (b"[rank 0] " + line) * 1000


def test_both_outputs_of_a_rank_stay_in_order_where_they_go_to_one_place(tmp_path: Path) -> None:
    def write(ends: Ends) -> None:
        for number in range(50):
            os.write(ends[0][number % 2], b"%d\n" % number)

    assert handed_on(tmp_path, 1, write).split()[2::3] == [b"%d" % number for number in range(50)]


def test_of_a_progress_bar_a_file_gets_the_last_state(tmp_path: Path) -> None:
    def write(ends: Ends) -> None:
        for done in range(101):
            os.write(ends[0][0], b"\r%d %%" % done)
        os.write(ends[0][0], b"\nover\r\n")

    assert handed_on(tmp_path, 1, write) == b"[rank 0] 100 %\n[rank 0] over\n"


def test_ranks_cannot_write_what_nobody_reads() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with relayed(1, (writing, writing)) as ends, pytest.raises(BrokenPipeError):
        write_for_ever(ends[0][0])
    os.close(writing)


def test_ranks_go_on_where_what_they_print_finds_no_room() -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    with relayed(1, (full, full)) as ends:
        for _ in range(200):  # More than a pipe holds: somebody takes it.
            os.write(ends[0][0], b"x" * 1000 + b"\n")
    os.close(full)


def write_for_ever(descriptor: int) -> None:
    while True:
        os.write(descriptor, b"x" * 1000 + b"\n")


PROGRAM = """
import os, tutti
rank = tutti.init().rank
os.write(1, b"out of %d\\nlast of %d" % (rank, rank))
"""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["-n", "2"], {"[rank 0] out of 0", "[rank 0] last of 0", "[rank 1] out of 1", "[rank 1] last of 1"}),
        (["-n", "1"], {"out of 0", "last of 0"}),
    ],
)
def test_the_ranks_of_a_program_are_told_apart(
    options: list[str], expected: set[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    assert main(["run", *options, str(tmp_path / "program.py")]) == 0
    assert set(capfd.readouterr().out.splitlines()) == expected


def test_the_ranks_of_a_program_write_themselves_where_that_is_asked_for(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    assert main(["run", "-n", "2", "--no-prefix", str(tmp_path / "program.py")]) == 0
    out = capfd.readouterr().out
    assert "last of 0" in out
    assert "[rank" not in out
