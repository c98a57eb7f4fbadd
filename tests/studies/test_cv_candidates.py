"""The candidates of a cross-validation, and the order of their jobs."""

from __future__ import annotations

from typing import Any

import pytest

from tutti.errors import BadOption, UnknownName, UserError
from tutti.farm.jobs import FarmJob, JobOutcome
from tutti.records.farm_folder import JobState
from tutti.records.run import Summary, World
from tutti.run.config import TrainConfig
from tutti.studies.cross_validation.candidates import Alternative, alternatives, candidates_of
from tutti.studies.cross_validation.study import FoldJobs
from tutti.studies.crossing import refuse_single_run

CONFIG = TrainConfig(epochs=1)
BASE = FarmJob("", CONFIG)


def _named(kind: str, *names: str) -> list[Alternative]:
    return alternatives(kind, [(None, name) for name in names])


def test_models_schedules_and_swept_options_are_crossed() -> None:
    found = candidates_of(
        BASE,
        _named("model", "mlp", "some/where/mine.py:Net"),
        _named("schedule", "none", "cosine"),
        {"lr": [0.1, 0.2], "model.hidden": [4]},
    )
    assert list(found)[:3] == [
        "mlp/none/lr=0.1,model.hidden=4",
        "mlp/none/lr=0.2,model.hidden=4",
        "mlp/cosine/lr=0.1,model.hidden=4",
    ]
    one = found["Net/cosine/lr=0.2,model.hidden=4"].config
    assert (one.model, one.schedule, one.lr) == ("some/where/mine.py:Net", "cosine", 0.2)
    assert one.model_options == {"hidden": 4}
    assert found["mlp/none/lr=0.1,model.hidden=4"].config.schedule == "none"


def test_each_model_has_its_own_defaults() -> None:
    base = FarmJob("", TrainConfig(epochs=1, lr=0.5))
    models, sweep = _named("model", "mlp", "tabular"), {"batch_size": [16]}
    found = candidates_of(base, models, alternatives("schedule", [(None, None)]), sweep)
    found |= candidates_of(base, models[1:], _named("schedule", "none", "linear"), sweep)
    common = {"epochs": 1, "lr": 0.5, "batch_size": 16}
    for name, options in [
        ("mlp/none/batch_size=16", {"optimizer": "adam", "schedule": None}),
        ("tabular/cosine/batch_size=16", {"optimizer": "adamw", "schedule": "cosine"}),
        ("tabular/none/batch_size=16", {"optimizer": "adamw", "schedule": "none"}),
        ("tabular/linear/batch_size=16", {"optimizer": "adamw", "schedule": "linear"}),
    ]:
        wanted = {**common, **options}
        assert {option: getattr(found[name].config, option) for option in wanted} == wanted


def test_models_with_the_same_name_get_the_names_of_their_files() -> None:
    found = _named("model", "a.py:Net", "b.py:Net", "mlp")
    assert [one.name for one in found] == ["a.Net", "b.Net", "mlp"]


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (["mlp", "cnn", "mlp"], "2 models have the name 'mlp'"),
        (["x/a.py:Net", "y/a.py:Net"], "have the name 'a.Net'"),
        ([], "no model is named"),
    ],
)
def test_equal_names_are_refused(models: list[str], message: str) -> None:
    with pytest.raises(BadOption, match=message):
        _named("model", *models)


@pytest.mark.parametrize(
    ("sweep", "kind", "message"),
    [
        ({"seed": [1]}, BadOption, "give --seed once"),
        ({"data.classes": [1]}, BadOption, "one data set"),
        ({"lr": [0.1, 0.1]}, BadOption, "give --sweep each value once"),
        ({"learning": [1]}, UnknownName, "learning"),
    ],
)
def test_options_that_cannot_be_swept_are_refused(
    sweep: dict[str, list[object]], kind: type[UserError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        candidates_of(BASE, _named("model", "mlp"), _named("schedule", "none"), sweep)


@pytest.mark.parametrize(
    ("option", "value"),
    [("split", "a:0"), ("out", "a"), ("workers", "2"), ("on_failure", "respawn"), ("validation", 0.3)],
)
def test_options_of_a_single_run_are_refused(option: str, value: Any) -> None:
    config = TrainConfig(epochs=1, **{option: value})
    with pytest.raises(BadOption, match=f"--{option.replace('_', '-')} is for a single run"):
        refuse_single_run(config, "validation")


def _outcome(seconds: float) -> JobOutcome:
    summary = Summary(None, None, 0, 1, 1, 1, seconds, 0.0, World(), {}, "")
    return JobOutcome(JobState.FINISHED, seconds, summary)


def test_one_fold_of_each_comes_first_and_then_the_longest() -> None:
    jobs = {name: [FarmJob(f"{name}/fold-{k}", CONFIG) for k in range(3)] for name in ("short", "long")}
    source = FoldJobs(jobs)
    first = [source.next() for _ in range(2)]
    assert [job.name for job in first if job] == ["short/fold-0", "long/fold-0"]
    source.ended(jobs["short"][0], _outcome(1.0))
    # It is not measured yet: it has taken longer already.
    third = source.next()
    assert third is not None
    assert third.name == "long/fold-1"
    source.ended(jobs["long"][0], _outcome(5.0))
    rest = [source.next() for _ in range(4)]
    assert [job and job.name for job in rest] == ["long/fold-2", "short/fold-1", "short/fold-2", None]
