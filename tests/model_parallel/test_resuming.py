"""Runs of one model on several ranks go on where they were: in their layout, in another, and undivided."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from tests.comm.ranks import World
from tests.kept_writers import nothing_beside_runs
from tests.model_parallel.runs import CNN, MLP, TOLERANCE, Found, Run, deviation, found_by
from tutti.comm.base import Communicator
from tutti.comm.shm.communicator import HostCommunicator
from tutti.exports.sources import read_from
from tutti.records.checkpoints import FOLDER, step_folder
from tutti.run.config import TrainConfig
from tutti.run.resume import Resume
from tutti.run.train_job import TrainJob

LONG: Run = {
    "optimizer": "adam",
    "optimizer_options": {"amsgrad": True},
    "seed": 1,
    "lr": 0.15,
    "schedule": "one_cycle",
    "clip_norm": 0.5,
    "batch_size": 32,
    "steps": 8,
    "checkpoint": "5 steps",
    "restore_best": True,
}
"""Two epochs of three steps each, and two more. The first is the best one, and step 5 is in the second."""

SAVED = 5
"""The step with a checkpoint."""

MODEL: Run = MLP | LONG | {"model_options": {"hidden": [24, 18, 12]}}
DROPPED: Run = CNN | LONG | {"model": "tests.model_parallel.models:dropped", "model_options": {}}

WAYS: dict[str, Run] = {
    "undivided": {},
    "tensor": {"parallel": "tensor"},
    "plan": {"parallel": "tensor", "parallel_options": {"plan": "tests.model_parallel.models:plan"}},
    "pipeline": {"parallel": "pipeline"},
    "sharded": {"parallel": "sharded"},
    "zbv": {"parallel": "pipeline", "parallel_options": {"schedule": "zbv"}},
}
"""On two ranks."""

TEAMS: dict[str, Run] = {f"teams, {way}": {"parallel": f"data=2,{way}=2"} for way in ("tensor", "sharded")}
"""On four ranks."""

Start = tuple[Run, str, Resume | None]
"""A configuration, a run folder, and the checkpoint in it to go on from."""


def train_all(comm: Communicator, starts: list[Start]) -> list[Found]:
    """Train one run after the other, or go on with it."""
    with nothing_beside_runs():
        return [
            found_by(
                comm,
                TrainJob(
                    replace(TrainConfig.from_json(config), out=out),
                    quiet=True,
                    bring_weights=True,
                    resume=resume,
                ),
            )
            for config, out, resume in starts
        ]


def on(ranks: int, starts: Mapping[str, Start]) -> dict[str, Found]:
    """What rank 0 of so many found."""
    if ranks > 1:
        with World(ranks) as world:
            found = world.run(train_all, [*starts.values()])[0]
    else:
        comm = HostCommunicator.alone()
        try:
            found = train_all(comm, [*starts.values()])
        finally:
            comm.close()
    return dict(zip(starts, found, strict=True))


def interrupted(folder: Path, config: Run) -> Start:
    """A run that goes on from the checkpoint of another one, in a copy of its folder."""
    copy = folder.with_name(f"{folder.name}, copy {len([*folder.parent.iterdir()])}")
    shutil.copytree(folder, copy, symlinks=True)
    return config, str(copy), Resume(copy, step_folder(copy / FOLDER, SAVED))


def begun(folder: Path, runs: Mapping[str, Run]) -> dict[str, Start]:
    """Runs from the beginning."""
    return {name: (config, str(folder / name), None) for name, config in runs.items()}


Resumed = dict[tuple[str, str], Found]
"""What was found by runs that went on, by the layout before and after."""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Found], Resumed]:
    """What runs found that were not interrupted, and those that were."""
    folder = tmp_path_factory.mktemp("runs")
    two = {name: MODEL | way for name, way in WAYS.items()}
    found = on(2, begun(folder, two))
    names = [*WAYS]
    pairs = [*zip(names, names, strict=True), *zip(names, [*names[1:], names[0]], strict=True)]
    resumed: Resumed = {}

    def go_on(ranks: int, runs: Mapping[str, Run], pairs: list[tuple[str, str]]) -> None:
        starts = {f"{a}|{b}": interrupted(folder / a, runs[b]) for a, b in pairs}
        done = on(ranks, starts)
        resumed.update({(a, b): done[f"{a}|{b}"] for a, b in pairs})

    go_on(2, two, pairs)
    four = {name: MODEL | way for name, way in TEAMS.items()}
    found |= on(4, begun(folder, four))
    go_on(4, four, [*((name, name) for name in four), ("pipeline", "teams, tensor")])
    go_on(1, {"alone": MODEL}, [(name, "alone") for name in ("tensor", "plan", "pipeline", *TEAMS)])
    return found, resumed


@pytest.mark.timeout(600)
def test_an_interrupted_run_goes_on_in_its_layout_as_if_it_had_not_been(
    trained: tuple[dict[str, Found], Resumed],
) -> None:
    found, resumed = trained
    for name in (*WAYS, *TEAMS):
        assert deviation(resumed[name, name], found[name]) == 0


@pytest.mark.timeout(600)
def test_it_goes_on_in_another_layout_and_undivided(trained: tuple[dict[str, Found], Resumed]) -> None:
    found, resumed = trained
    others = [(before, after) for before, after in resumed if before != after]
    assert {after for _, after in others} == {*WAYS, "teams, tensor", "alone"}
    for before, after in others:
        one = resumed[before, after]
        assert deviation(one, found[before]) < TOLERANCE
        assert one.summary is not None
        assert one.summary.best_epoch == 1


@pytest.mark.timeout(600)
def test_random_numbers_and_statistics_go_on_in_the_same_layout(tmp_path: Path) -> None:
    runs = {name: DROPPED | WAYS[name] for name in ("tensor", "pipeline", "sharded")}
    found = on(2, begun(tmp_path, runs))
    resumed = on(2, {name: interrupted(tmp_path / name, config) for name, config in runs.items()})
    for name, one in found.items():
        assert deviation(resumed[name], one) == 0


@pytest.mark.timeout(600)
def test_frozen_tied_and_unused_parameters_have_their_names_everywhere(tmp_path: Path) -> None:
    ways = [
        *(("tied", *pair) for pair in pairwise(["tensor", "pipeline", "sharded", "tensor"])),
        ("ResidualNet", "pipeline", "sharded"),
        ("ResidualNet", "sharded", "pipeline"),
        ("Encoder", "pipeline", "undivided"),
    ]

    def config(model: str, way: str) -> Run:
        other: Run = {"model": f"tests.model_parallel.models:{model}", "model_options": {}, "lr": 0.01}
        return MODEL | other | WAYS[way]

    found = on(2, begun(tmp_path, {f"{model} {way}": config(model, way) for model, way, _ in ways}))
    after = {f"{model} {before}": config(model, after) for model, before, after in ways}
    resumed = on(2, {name: interrupted(tmp_path / name, config) for name, config in after.items()})
    for name, one in found.items():
        assert deviation(resumed[name], one) < TOLERANCE
    # Of a run in its middle, whose state has the same names and shapes as one of the undivided model.
    whole, parts = (
        read_from(step_folder(tmp_path / name / FOLDER, SAVED))
        for name in ("ResidualNet sharded", "ResidualNet pipeline")
    )
    assert [*whole.weights] == [*parts.weights]
    assert whole.optimizer is not None
    assert parts.optimizer is not None
    assert [*whole.optimizer["state"]] == [*parts.optimizer["state"]]
    for one, other in zip(whole.weights.values(), parts.weights.values(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=TOLERANCE)


@pytest.mark.timeout(600)
def test_what_cannot_be_divided_or_put_together_is_refused_by_name(tmp_path: Path) -> None:
    """Adafactor keeps means of a weight's rows and columns: of a part they are others than of the whole."""
    factored: Run = {"optimizer": "Adafactor", "optimizer_options": {}, "schedule": None}
    runs = {name: MODEL | factored | WAYS[name] for name in ("undivided", "tensor", "pipeline")}
    found = on(2, begun(tmp_path, runs))
    pairs = [("tensor", "tensor"), ("tensor", "pipeline"), ("undivided", "tensor"), ("pipeline", "undivided")]
    resumed = on(2, {f"{a}|{b}": interrupted(tmp_path / a, runs[b]) for a, b in pairs})
    assert deviation(resumed["tensor|tensor"], found["tensor"]) == 0
    assert deviation(resumed["pipeline|undivided"], found["pipeline"]) < TOLERANCE
    together, divided = resumed["tensor|pipeline"].refused, resumed["undivided|tensor"].refused
    assert together.startswith("BadCheckpoint: ")
    assert "has 'optimizer/1.weight/col_var' and" in together
    assert together.endswith("resume as the run was, with -n 2 --parallel tensor")
    assert divided.startswith("BadCheckpoint: 'optimizer/1.weight/")
    assert divided.endswith("resume with --parallel none")
