"""Whatever stands in the files of a run is a record, or an error of ours; and every record can be shown."""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.reports.recorded_comparison import PIPELINE, WAYS, write_comparison
from tests.watching.seen import beat, epoch, summary, usage, write_run
from tutti.errors import BadRunFolder, TuttiError
from tutti.records.comparison import Comparison, ComparisonFolder
from tutti.records.heartbeat import Heartbeat
from tutti.records.json_lines import Json, Record, parse_record, to_json
from tutti.records.pipeline import PipelineRecord
from tutti.records.run import EpochRecord, Evaluation, RankRecord, Summary
from tutti.records.run_folder import StrategyFacts, TrainedOn
from tutti.records.usage import UsageRecord
from tutti.reports.advice import advice
from tutti.reports.figures import FIGURES
from tutti.reports.results import read_results
from tutti.reports.text import show
from tutti.run.config import TrainConfig
from tutti.watching.follow import Printer
from tutti.watching.follow import show as show_run
from tutti.watching.health import Limits, examine
from tutti.watching.snapshot import Watched

_TEMPLATES = TemporaryDirectory()

LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(
        [0, -1, 1 << 53, 10**400, 1e308, -0.0, float("inf"), float("nan"), "NaN", "²", "9" * 30]
    )
    | st.floats()
    | st.text(max_size=8)
    | st.sampled_from(["a[/foo]b", "run[bold]x", "\x1b[31m", "../secret", "/etc/passwd", "\udcff", ""])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)

TRAINED_ON: Json = {"name": "a", "classes": 2, "labels": ["x"], "shape": [8], "mean": [0.0], "std": [1.0]}
COMPARED = Comparison("lenet", "mnist", 2, 0.7, WAYS)


def values_of(record: Record) -> Json:
    return json.loads(to_json(record))


RECORDS: dict[str, tuple[type[Record], Json]] = {
    "evaluation": (Evaluation, values_of(Evaluation(4, 0.5, {"accuracy": 0.5}, [[1, 1], [0, 2]]))),
    "rank": (RankRecord, values_of(epoch(1))["ranks"][0]),
    "epoch": (EpochRecord, values_of(epoch(1))),
    "summary": (Summary, values_of(summary(2))),
    "heartbeat": (Heartbeat, values_of(beat(1))),
    "usage": (UsageRecord, values_of(usage("sleeping", "gone"))),
    "pipeline": (PipelineRecord, values_of(PIPELINE)),
    "data": (TrainedOn, TRAINED_ON),
    "strategy": (StrategyFacts, values_of(StrategyFacts("free", "--strategy.every 40"))),
    "comparison": (Comparison, values_of(COMPARED)),
}


def places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Where a value stands in a JSON value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(found for key, item in inner for found in places(item, (*path, key)))]


@st.composite
def damaged(draw: st.DrawFn, values: Json) -> object:
    """The values with others in a few places, or less."""
    values = copy.deepcopy(values)
    for _ in range(draw(st.integers(1, 3))):
        *path, last = draw(st.sampled_from([place for place in places(values) if place]))
        target = values
        for key in path:
            target = target[key]
        if draw(st.booleans()) and isinstance(target, dict):
            del target[last]
        else:
            target[last] = draw(VALUES)
        if not any(places(values)):
            break
    return values


@pytest.mark.parametrize("name", RECORDS)
@settings(derandomize=True, max_examples=60, deadline=None)
@given(data=st.data())
def test_a_reader_gives_a_record_or_a_value_error(name: str, data: st.DataObject) -> None:
    kind, values = RECORDS[name]
    text = json.dumps(data.draw(damaged(values) | VALUES))
    try:
        parse_record(text, kind)
    except (ValueError, TuttiError):
        return


@settings(derandomize=True, max_examples=60, deadline=None)
@given(values=damaged(TrainConfig().as_json()) | VALUES)
def test_a_configuration_is_one_or_an_error_of_ours(values: object) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder, "config.json")
        path.write_text(json.dumps(values))
        try:
            TrainConfig.read(path)
        except TuttiError:
            return


@settings(derandomize=True, max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_watched_run_is_shown_or_refused(data: st.DataObject) -> None:
    with TemporaryDirectory() as place:
        at = beat(0, time=time.time(), moved=time.time())
        folder = write_run(Path(place, "run"), at, beat(1), epochs=2, finished=True, usage=usage("sleeping"))
        if data.draw(st.booleans()):
            (folder / "summary.json").unlink()
        damage(folder, data)
        output = io.StringIO()
        try:
            show_run(folder, Limits(), output)
            watched = Watched(folder)
            run = watched.read(time.time())
            Printer(output).tell(run, examine(run, Limits()))
        except TuttiError:
            return
        assert "\x1b" not in output.getvalue()


@settings(derandomize=True, max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_comparison_is_reported_or_refused(data: st.DataObject) -> None:
    with TemporaryDirectory() as place:
        folder = Path(shutil.copytree(compared(), Path(place, "compared")))
        damage(folder, data)
        report(folder)


@settings(derandomize=True, max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_a_run_is_reported_or_refused(data: st.DataObject) -> None:
    with TemporaryDirectory() as place:
        folder = write_run(Path(place, "run"), epochs=2, finished=True, usage=usage("sleeping"))
        config = {**TrainConfig().as_json(), "workers": "1", "threads": 1, "strategy": "solo"}
        (folder / "config.json").write_text(json.dumps(config))
        damage(folder, data)
        report(folder)


@cache
def compared() -> Path:
    """A comparison that is written once, to be copied."""
    folder = Path(_TEMPLATES.name, "compared")
    write_comparison(folder)
    return folder


def damage(folder: Path, data: st.DataObject) -> None:
    """Change something in one of the files."""
    path = data.draw(st.sampled_from(sorted(path for path in folder.rglob("*.json*") if path.is_file())))
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.suffix == ".jsonl" else []
    if lines:
        lines[-1] = data.draw(damaged(lines[-1]))
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    else:
        path.write_text(json.dumps(data.draw(damaged(json.loads(path.read_text())))))


def report(folder: Path) -> None:
    output = io.StringIO()
    try:
        results = read_results([folder])
    except TuttiError:
        return
    show(results, output)
    assert "\x1b" not in output.getvalue()
    for figure in FIGURES.values():
        figure.draw(results)
        figure.says(results)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(
    config=st.dictionaries(st.sampled_from([*TrainConfig().as_json()]), VALUES, max_size=6),
    facts=st.none()
    | st.builds(StrategyFacts, st.sampled_from(["free", "together", "x"]), st.text(min_size=1)),
)
def test_advice_is_given_whatever_the_records_say(config: Json, facts: StrategyFacts | None) -> None:
    for stage in ("data", "wait", "reduce", "validation", "checkpoint", "update", "copy"):
        assert advice([{stage: 1.0, "samples": 4.0}, {"forward": 0.1, "samples": 4.0}], config, facts)


@pytest.mark.parametrize("name", ["../secret", "/etc", "..", "a/b", ".", "", "a/"])
def test_a_comparison_names_no_folder_outside_its_own(tmp_path: Path, name: str) -> None:
    write_comparison(tmp_path / "compared")
    path = tmp_path / "compared" / "comparison.json"
    values = json.loads(path.read_text())
    values["combinations"][0]["folder"] = name
    path.write_text(json.dumps(values))
    with pytest.raises(BadRunFolder, match="folder"):
        ComparisonFolder(tmp_path / "compared").read()


def test_a_name_with_markup_is_shown_as_it_is(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run[bold]x", epochs=1, finished=True)
    (folder / "config.json").write_text(
        json.dumps({**TrainConfig().as_json(), "model": "a[/foo]b:smile:", "workers": "1", "threads": 1})
    )
    for look in (lambda out: show(read_results([folder]), out), lambda out: show_run(folder, Limits(), out)):
        output = io.StringIO()
        look(output)
        assert "a[/foo]b:smile:" in output.getvalue()
        assert "run[bold]x" in output.getvalue()


@pytest.mark.parametrize(
    "name", ["history.jsonl", "summary.json", "config.json", "usage.jsonl", "ranks/0.json"]
)
@pytest.mark.parametrize("what", ["a pipe", "a link to a device"])
@pytest.mark.timeout(60)
def test_what_is_no_file_is_neither_waited_for_nor_read(tmp_path: Path, name: str, what: str) -> None:
    folder = write_run(tmp_path / "run", beat(0), epochs=1, finished=True, usage=usage("sleeping"))
    config = {**TrainConfig().as_json(), "workers": "1", "threads": 1, "strategy": "solo"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / name).unlink()
    if what == "a pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to("/dev/zero")
    for look in (lambda out: show(read_results([folder]), out), lambda out: show_run(folder, Limits(), out)):
        with suppress(BadRunFolder):
            look(io.StringIO())
