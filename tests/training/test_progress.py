"""What a person sees of a run."""

from __future__ import annotations

import io
import itertools
import re
import time

import pytest

from tutti.records.heartbeat import TESTING
from tutti.records.run import EpochRecord, Evaluation
from tutti.records.texts import RunLength
from tutti.training.progress import (
    Bar,
    Moment,
    PlainLines,
    Progress,
    Several,
    progress_on,
)

TRAIN = Evaluation(1000, 0.21543, {"accuracy": 0.9312, "mae": 0.5})
RECORD = EpochRecord(
    epoch=2,
    step=16,
    complete=True,
    train=TRAIN,
    validation=Evaluation(100, 0.25, {"accuracy": 0.92}),
    seconds={},
    samples_per_s=12_345.6,
    lr=0.1,
    time="",
)


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def show(progress: Progress) -> None:
    progress.begin(RunLength(updates=24, per_epoch=8))
    progress.moment(Moment(2, 12, TRAIN, 10_000.0))
    progress.epoch(RECORD)
    progress.end()


def test_without_a_terminal_there_is_a_plain_line_for_each_epoch() -> None:
    stream = io.StringIO()
    show(progress_on(stream))
    moment, epoch = stream.getvalue().splitlines()
    assert moment.startswith("epoch 2/3   50%  loss 0.2154  accuracy 93.12%  mae 0.5  10,000 samples/s  ")
    assert epoch.startswith("epoch 2/3  loss 0.2154  accuracy 93.12%  mae 0.5  validation loss 0.2500  ")
    assert "accuracy 92.00%  12,346 samples/s" in epoch
    assert epoch.endswith(" left")
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_a_bar_that_goes_away_and_lines_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    stream = Terminal()
    progress = progress_on(stream)
    assert isinstance(progress, Bar)
    show(progress)
    text = stream.getvalue()
    assert "10,000 samples/s" in text
    assert "epoch 2/3  loss 0.2154  accuracy 93.12%" in text
    assert "12,346 samples/s\n" in text


@pytest.mark.parametrize(
    ("columns", "whole"), [(80, "accuracy 93.12%  mae 0.5"), (60, "loss 0.2154"), (40, "")]
)
def test_a_narrow_terminal_keeps_the_bar_and_leaves_out_whole_figures(
    monkeypatch: pytest.MonkeyPatch, columns: int, whole: str
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    stream = Terminal()
    bar = Bar(stream, quiet=True)
    bar.begin(RunLength(updates=24, per_epoch=8))
    bar.moment(Moment(2, 12, TRAIN, 10_000.0))
    bar.doing(TESTING)
    bar.end()
    text = re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", stream.getvalue())
    assert "…" not in text
    assert re.search(rf"epoch 2/3 .* 50% .*{whole}", text)


def test_time_left_is_reckoned_from_how_far_training_is_when_a_record_comes_late(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([0.0, 20.0, 20.0])
    monkeypatch.setattr("time.monotonic", lambda: next(times))
    stream = io.StringIO()
    lines = PlainLines(stream)
    lines.begin(RunLength(updates=24, per_epoch=8))
    lines.moment(Moment(3, 20, TRAIN, 10_000.0))
    lines.epoch(RECORD)
    assert [line.split()[-2:] for line in stream.getvalue().splitlines()] == [["0:04", "left"]] * 2


class Noted:
    """Notes what it is told."""

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self.calls: list[str] = []

    def begin(self, span: RunLength, step: int = 0) -> None:
        self.calls.append("begin")

    def moment(self, moment: Moment) -> None:
        self.calls.append(f"moment {moment.step}")

    def doing(self, what: str, step: int | None = None) -> None:
        self.calls.append(what)

    def epoch(self, record: EpochRecord) -> None:
        self.calls.append("epoch")

    def end(self) -> None:
        self.calls.append("end")


def test_several_ways_to_show_a_run_get_as_many_moments_as_they_want(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    often, seldom = Noted(1.0), Noted(3.0)
    both = Several(often, seldom)
    assert both.every_s == 1.0
    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    both.begin(RunLength(10, 10))
    for step in range(1, 5):
        clock[0] += 1.0
        both.moment(Moment(1, step, Evaluation(1, 0.5), 1.0))
    assert often.calls == ["begin", "moment 1", "moment 2", "moment 3", "moment 4"]
    assert seldom.calls == ["begin", "moment 3"]


def test_a_notebook_gets_one_line_for_each_epoch_and_a_bar_that_is_written_over() -> None:
    stream = io.StringIO()
    shown = progress_on(stream, notebook=True)
    shown.begin(RunLength(updates=16, per_epoch=8))
    shown.moment(Moment(epoch=1, step=4, train=TRAIN, samples_per_s=9.0))
    shown.epoch(RECORD)
    shown.end()
    # Notebooks ignore all commands but carriage returns.
    text = re.sub(r"\x1b\[\d*K", "", stream.getvalue())
    assert "\x1b" not in text
    *_, epoch, bar = [line.split("\r")[-1] for line in text.strip().split("\n")]
    assert bar.startswith("epoch 2/2")
    assert "━━━━" in bar
    assert epoch.rstrip().endswith("12,346 samples/s")
    # Each state is blanked to its end by the next one.
    states = text.split("\n")[0].split("\r")
    assert all(len(b) >= len(a.rstrip()) for a, b in itertools.pairwise(states))
