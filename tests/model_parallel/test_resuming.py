"""Runs of one model on several ranks go on where they were, in the same layout."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.comm.ranks import World
from tests.kept_writers import nothing_beside_runs
from tests.model_parallel.runs import CNN, MLP, Found, Run, deviation, run
from tutti.comm.base import Communicator
from tutti.errors import BadCheckpoint
from tutti.exports.sources import read_from
from tutti.records.checkpoints import FOLDER, step_folder
from tutti.run.resume import Resume

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
    "pipeline": {"parallel": "pipeline"},
    "sharded": {"parallel": "sharded"},
}
"""On two ranks."""

TEAMS: dict[str, Run] = {"teams, sharded": {"parallel": "data=2,sharded=2"}}
"""On four ranks."""

Start = tuple[Run, str, Resume | None]
"""A configuration, a run folder, and the checkpoint in it to go on from."""


def train_all(comm: Communicator, starts: list[Start]) -> list[Found]:
    """Train one run after the other, or go on with it."""
    with nothing_beside_runs():
        return [run(comm, config | {"out": out}, write=True, resume=resume) for config, out, resume in starts]


def on(ranks: int, starts: Mapping[str, Start]) -> dict[str, Found]:
    """What rank 0 of so many found."""
    with World(ranks) as world:
        found = world.run(train_all, [*starts.values()])[0]
    return dict(zip(starts, found, strict=True))


def interrupted(folder: Path, config: Run) -> Start:
    """A run that goes on from the checkpoint of another one, in a copy of its folder."""
    copy = folder.with_name(f"{folder.name}, copy {len([*folder.parent.iterdir()])}")
    shutil.copytree(folder, copy, symlinks=True)
    return config, str(copy), Resume(copy, step_folder(copy / FOLDER, SAVED))


def begun(folder: Path, runs: Mapping[str, Run]) -> dict[str, Start]:
    """Runs from the beginning."""
    return {name: (config, str(folder / name), None) for name, config in runs.items()}


TIED: Run = MODEL | {"model": "tests.model_parallel.models:tied", "model_options": {}, "lr": 0.01}
FACTORED: Run = MODEL | {"optimizer": "Adafactor", "optimizer_options": {}, "schedule": None}
"""Keeps means of the rows and columns of a weight: of a part they are others than of the whole."""


def cases(ranks: int) -> dict[str, Run]:
    """Runs that go on in their layout."""
    if ranks == 4:
        return {name: MODEL | way for name, way in TEAMS.items()}
    found = {name: MODEL | way for name, way in WAYS.items()}
    found |= {"dropped, pipeline": DROPPED | WAYS["pipeline"], "tied, sharded": TIED | WAYS["sharded"]}
    found["factored, tensor"] = FACTORED | WAYS["tensor"]
    unused: Run = {"model": "tests.model_parallel.models:ResidualNet", "model_options": {}, "lr": 0.01}
    return found | {"unused, pipeline": MODEL | unused | WAYS["pipeline"]}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [2, 4])
def test_an_interrupted_run_resumes_in_its_layout_with_the_same_result(tmp_path: Path, ranks: int) -> None:
    runs = cases(ranks)
    found = on(ranks, begun(tmp_path, runs))
    resumed = on(ranks, {name: interrupted(tmp_path / name, config) for name, config in runs.items()})
    for name, one in found.items():
        assert deviation(resumed[name], one) == 0, name


@pytest.mark.timeout(600)
def test_another_layout_is_refused_and_its_checkpoint_has_parts_alone(tmp_path: Path) -> None:
    runs = {name: MODEL | WAYS[name] for name in ("undivided", "tensor")}
    for one in on(2, begun(tmp_path, runs)).values():
        assert not one.refused
    pairs = [("tensor", "undivided"), ("undivided", "tensor")]
    resumed = on(2, {f"{a}|{b}": interrupted(tmp_path / a, runs[b]) for a, b in pairs})
    assert resumed["tensor|undivided"].refused.startswith("BadCheckpoint: ")
    assert resumed["tensor|undivided"].refused.endswith("resume it with -n 2 --parallel tensor")
    assert resumed["undivided|tensor"].refused.endswith("resume it with -n 2, without --parallel")
    with pytest.raises(BadCheckpoint, match=r"part of the model alone.*--steps 5"):
        read_from(step_folder(tmp_path / "tensor" / FOLDER, SAVED))
