"""Runs that go on from a checkpoint: they end where the uninterrupted one does, or say why they cannot."""

from __future__ import annotations

import csv
import pickle
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import tutti
from tutti.comm.virtual.world import VirtualWorld
from tutti.errors import BadCheckpoint, BadOption
from tutti.records.checkpoints import FOLDER, step_folder
from tutti.records.run import EpochRecord, RunStart
from tutti.records.run_folder import RunFolder
from tutti.run import saving
from tutti.run.config import TrainConfig
from tutti.run.resume import Resume
from tutti.run.train import work
from tutti.run.train_job import RunOutcome, TrainJob
from tutti.training.loggers import Logbook

pytestmark = pytest.mark.usefixtures("nothing_beside")

INPUTS = torch.rand(150, 6, generator=torch.Generator().manual_seed(0))
TARGETS = (INPUTS.sum(1) * 2).long() % 5

NETWORK = """
import torch
from torch import nn

class CountingNorm(nn.BatchNorm1d):
    def __init__(self, width):
        super().__init__(width)
        self.calls = 0
    def get_extra_state(self):
        return torch.tensor(self.calls)
    def set_extra_state(self, state):
        self.calls = int(state)
    def forward(self, x):
        self.calls += self.training
        return super().forward(x) / (1 + self.calls)

def spread(outputs, targets):
    return outputs[:, 0].mul(1e3).sin() * 1e3**targets

def network(norm=False, width=16):
    middle = CountingNorm(width) if norm else nn.LayerNorm(width)
    return nn.Sequential(nn.Linear(6, width), middle, nn.Tanh(), nn.Dropout(0.2), nn.Linear(width, 5))
"""

UPDATES, MIDDLE = 5, 7
"""Of an epoch; and where runs are interrupted, in the middle of the second."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the runs learn from."""
    place = tmp_path_factory.mktemp("runs")
    (place / "net.py").write_text(NETWORK)
    np.savez(place / "data.npz", x=INPUTS.numpy(), y=TARGETS.numpy())
    np.savez(place / "other.npz", x=INPUTS.numpy() + 1, y=TARGETS.numpy())
    return place


def config_of(place: Path, name: str, **options: Any) -> TrainConfig:
    given: dict[str, Any] = {
        "model": f"{place / 'net.py'}:network",
        "data": str(place / "data.npz"),
        "epochs": 3,
        "batch_size": 24,
        "validation": 0.2,
        "optimizer": "adam",
        "schedule": "one_cycle",
        "lr": 0.01,
        "clip_norm": 0.5,
        "precision": "fp64",
        "threads": 1,
        "checkpoint": f"{MIDDLE} steps",
        "keep": 9,
        "out": str(place / name),
    }
    return TrainConfig.from_json({**given, **options})


def train(
    config: TrainConfig, ranks: int, resume: Resume | None = None, trace: bool = False, hosts: int = 1
) -> RunOutcome:
    """Run the ranks as threads of this process."""
    payload = pickle.dumps(TrainJob(config, resume=resume, quiet=True, trace=trace))
    return VirtualWorld(ranks, ranks // hosts).run(lambda comm: work(comm, payload))[0]


def middle_of(run: Path, step: int = MIDDLE) -> Path:
    return step_folder(run / FOLDER, step)


def copy_of(run: Path, place: Path, step: int = MIDDLE) -> Path:
    """A run that was killed after the checkpoint of a step, by default that in its middle."""
    copy = shutil.copytree(run, place, symlinks=True)
    (copy / "summary.json").unlink()
    for checkpoint in (copy / FOLDER).glob("step-*"):
        if checkpoint.name != middle_of(run, step).name:
            shutil.rmtree(checkpoint)
    return copy


def resumed(run: Path, place: Path, ranks: int, config: TrainConfig) -> Path:
    """Let a copy of a run go on from its middle."""
    copy = copy_of(run, place)
    train(replace(config, out=str(copy)), ranks, Resume(copy))
    return copy


def weights(run: Path) -> dict[str, Tensor]:
    return load_file(run / "weights.safetensors")


def apart(one: Path, other: Path) -> float:
    """The largest relative difference of their weights."""
    ours, theirs = weights(one), weights(other)
    assert list(ours) == list(theirs)
    pairs = [(ours[name].double(), theirs[name].double()) for name in ours]
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)


TIMES = {"seconds", "samples_per_s", "time", "ranks"}


def untimed(record: EpochRecord) -> dict[str, Any]:
    """All of a record but times, and what each rank did."""
    return {name: value for name, value in vars(record).items() if name not in TIMES}


def remembering(place: Path) -> dict[str, Any]:
    """The options of a run whose model remembers something, and whose figures have a rounding."""
    metrics = f"accuracy,{place / 'net.py'}:spread"
    return {"model_options": {"norm": True}, "metrics": metrics}


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """A run with batch norm that was never interrupted, on 2 ranks."""
    train(replace(config_of(place, "whole"), **remembering(place)), 2)
    return place / "whole"


@pytest.fixture(scope="module")
def whole_anywhere(place: Path) -> Path:
    """Likewise, whose mathematics does not depend on the ranks."""
    train(config_of(place, "anywhere"), 2)
    return place / "anywhere"


def test_the_same_number_of_ranks_gives_the_same_bits(whole: Path, place: Path, tmp_path: Path) -> None:
    run = resumed(whole, tmp_path / "run", 2, replace(config_of(place, ""), **remembering(place)))
    ours, theirs = weights(run), weights(whole)
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    records = [RunFolder(one).lines(EpochRecord).records for one in (run, whole)]
    assert [untimed(one) for one in records[0]] == [untimed(one) for one in records[1]]
    done = [[[(rank.updates, rank.samples) for rank in one.ranks] for one in found] for found in records]
    assert done[0] == done[1]
    columns = [_columns(one) for one in (run, whole)]
    assert columns[0] == columns[1]
    # The starts are told, and the first epochs stand there once.
    first, second = RunFolder(run).lines(RunStart).records
    assert (first.step, second.step, second.world.ranks, second.anew) == (0, MIDDLE, 2, ())


def _columns(run: Path) -> list[dict[str, str]]:
    timed = ("seconds/", "stages/", "samples_per_s", "time")
    with (run / "history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3
    return [{name: text for name, text in row.items() if not name.startswith(timed)} for row in rows]


def test_interrupted_after_one_and_a_half_epochs_a_run_comes_to_the_same_end(
    place: Path, tmp_path: Path
) -> None:
    """With sync, Adam, a one-cycle schedule, clipping and dropout, by any number of ranks and hosts."""
    config, whole = config_of(place, "", batch_size=20, checkpoint="9 steps"), tmp_path / "whole"
    train(replace(config, out=str(whole)), 2)
    assert [one.step for one in RunFolder(whole).lines(EpochRecord).records] == [6, 12, 18]
    for ranks, hosts, most_apart in ((2, 1, 0.0), (1, 1, 1e-12), (3, 1, 1e-12), (2, 2, 1e-12), (4, 2, 1e-12)):
        run = copy_of(whole, tmp_path / f"{ranks} on {hosts}", 9)
        train(replace(config, out=str(run)), ranks, Resume(run), hosts=hosts)
        assert apart(run, whole) <= most_apart, (ranks, hosts)
        records = [RunFolder(one).lines(EpochRecord).records for one in (run, whole)]
        for ours, theirs in zip(*records, strict=True):
            assert (ours.step, ours.train.samples, ours.lr) == (theirs.step, theirs.train.samples, theirs.lr)
            assert ours.train.loss == pytest.approx(theirs.train.loss, rel=1e-12)
            assert ours.validation is not None
            assert theirs.validation is not None
            assert ours.validation.loss == pytest.approx(theirs.validation.loss, rel=1e-12)
        start = RunFolder(run).lines(RunStart).records[-1]
        assert (start.step, start.world.ranks) == (9, ranks)


def test_a_stopped_run_is_resumed_to_the_same_end(
    whole_anywhere: Path, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(config_of(place, ""), out=str(tmp_path / "run"), checkpoint="1 step")
    asked = iter([False] * 20)
    told: list[Logbook] = []
    with monkeypatch.context() as patch:
        patch.setattr(saving, "stop_requested", lambda: next(asked, True))
        patch.setattr(Logbook, "stop", lambda book: told.append(book))
        outcome = train(config, 2)
    assert told
    assert outcome.stopped is not None
    assert outcome.summary is None
    assert not RunFolder(tmp_path / "run").finished
    outcome = train(config, 2, Resume(tmp_path / "run"))
    assert outcome.summary is not None
    assert 0 < RunFolder(tmp_path / "run").lines(RunStart).records[-1].step < 3 * UPDATES
    assert apart(tmp_path / "run", whole_anywhere) == 0


def test_a_schedule_of_torch_is_resumed(place: Path, tmp_path: Path) -> None:
    config = config_of(place, "", schedule="MultiStepLR", schedule_options={"milestones": [3, 9]})
    train(replace(config, out=str(tmp_path / "whole")), 2)
    run = resumed(tmp_path / "whole", tmp_path / "run", 2, config)
    assert apart(run, tmp_path / "whole") == 0


@pytest.mark.parametrize("average", ["ema:0.9", "swa:0.3"])
@pytest.mark.parametrize(("strategy", "ranks", "most"), [("sync", 3, 1e-12), ("sync", 2, 0), ("local", 2, 0)])
def test_an_average_is_resumed(
    place: Path, tmp_path: Path, average: str, strategy: str, ranks: int, most: float
) -> None:
    options = {"model_options": {"norm": ranks == 2}, "strategy": strategy, "average": average}
    config = config_of(place, "", **options)
    train(replace(config, out=str(tmp_path / "whole")), 2)
    run = resumed(tmp_path / "whole", tmp_path / "run", ranks, config)
    assert apart(run, tmp_path / "whole") <= most


@pytest.mark.parametrize(
    ("strategy", "length", "end"),
    [
        ("sync", {"epochs": 2}, {}),
        ("local", {"epochs": None, "steps": MIDDLE}, {}),
        ("easgd_sync", {}, {"monitor": "train_loss", "goal": 1000}),
    ],
)
def test_a_finished_run_can_be_continued_like_a_longer_one(
    place: Path, tmp_path: Path, strategy: str, length: dict[str, Any], end: dict[str, Any]
) -> None:
    options = {"strategy": strategy, "schedule": "StepLR", "restore_best": strategy == "sync"}
    options |= {
        "model_options": {"norm": True},
        "schedule_options": {"step_size": 4, "gamma": 0.7},
        "keep": 1,
    }
    config = config_of(place, "", **options, checkpoint="1000 steps")
    short, long, plain = (str(tmp_path / name) for name in ("short", "long", "plain"))
    first = train(replace(config, **length, **end, out=short), 2)
    made = first.history[-1].step
    assert [path.name for path in (tmp_path / "short" / FOLDER).glob("step-*")] == [f"step-{made:08d}"]
    # Nothing is changed by it.
    train(replace(config, **length, **end, checkpoint="off", out=plain), 2)
    assert apart(tmp_path / "plain", tmp_path / "short") == 0
    assert not (tmp_path / "plain" / FOLDER).exists()
    outcome, whole = (
        train(replace(config, out=short), 2, Resume(tmp_path / "short")),
        train(replace(config, out=long), 2),
    )
    assert apart(tmp_path / "short", tmp_path / "long") == 0
    assert [untimed(one) for one in outcome.history] == [untimed(one) for one in whole.history]
    assert RunFolder(tmp_path / "short").lines(RunStart).records[-1].step == made


@pytest.mark.parametrize(
    ("before", "after", "ranks"),
    [("sync", "local", 2), ("local", "local", 3), ("solo", "sync", 2), ("solo", "diloco", 1)],
)
def test_another_strategy_or_other_ranks_continue_with_the_learning_rate_of_the_step(
    place: Path, tmp_path: Path, before: str, after: str, ranks: int
) -> None:
    options = {"batch_size": 24, "strategy": before, "checkpoint": "3 steps", "epochs": 2}
    config = replace(config_of(place, "", **options), out=str(tmp_path / "run"))
    train(config, 1 if before == "solo" else 2)
    first = step_folder(tmp_path / "run" / FOLDER, 3)
    now = replace(config, strategy=after, strategy_options={}, out=str(tmp_path / "run"))
    outcome = train(now, ranks, Resume(tmp_path / "run", first))
    uninterrupted = train(replace(now, out=str(tmp_path / "other")), ranks)
    assert outcome.history[-1].lr == pytest.approx(uninterrupted.history[-1].lr, rel=1e-12)
    start = RunFolder(tmp_path / "run").lines(RunStart).records[-1]
    assert start.step == 3
    if {before, after} == {"solo", "sync"}:
        assert not start.anew
    elif before != after:
        assert start.anew == ("the state of the other strategy's workers",)


def changed(checkpoint: Path) -> None:
    """Damage a checkpoint."""
    path = checkpoint / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(content)


@pytest.fixture
def run(whole_anywhere: Path, tmp_path: Path) -> Iterator[Path]:
    """A killed run, whose history no refusal may change."""
    run = copy_of(whole_anywhere, tmp_path / "run")
    history = (run / "history.jsonl").read_bytes()
    yield run
    assert (run / "history.jsonl").read_bytes() == history


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"model_options": {"width": 8}}, BadCheckpoint, r"another model.*'0.weight' of shape \("),
        ({"model": "mlp"}, BadCheckpoint, r"another model.*'3\.weight'"),
        ({"data": "other.npz"}, BadCheckpoint, "other data: the train and validation samples differ"),
        ({"epochs": 1}, BadOption, r"end after 5 steps, and .* was made after 7; give more --epochs"),
        ({"epochs": None, "steps": MIDDLE - 1}, BadOption, r"end after 6 steps, and .* was made after 7"),
    ],
)
def test_another_model_other_data_or_a_shorter_run_is_refused(
    place: Path, run: Path, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    if "data" in options:
        options = {"data": str(place / options["data"])}
    with pytest.raises(error, match=message):
        train(replace(config_of(place, "", **options), out=str(run)), 2, Resume(run))


def test_a_damaged_checkpoint_is_passed_over(
    whole_anywhere: Path, place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = shutil.copytree(whole_anywhere, tmp_path / "run", symlinks=True)
    (run / "summary.json").unlink()
    for step in (2 * MIDDLE, 3 * UPDATES):
        changed(step_folder(run / FOLDER, step))
    train(replace(config_of(place, ""), out=str(run)), 2, Resume(run))
    assert "tutti: warning: " in capsys.readouterr().err
    assert RunFolder(run).lines(RunStart).records[-1].step == MIDDLE
    assert apart(run, whole_anywhere) == 0


# From Python.

DATA = (INPUTS, TARGETS)


def make() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.03)


@pytest.mark.parametrize("given", ["module", "function"])
def test_a_run_from_python_is_resumed_with_the_same_objects(given: str, tmp_path: Path) -> None:
    model = make if given == "function" else None
    options: dict[str, Any] = {"workers": 1, "threads": 1, "quiet": True}
    first = tutti.train(
        model or make(),
        DATA,
        **options,
        optimizer=adam,
        epochs=2,
        batch_size=30,
        checkpoint="1 epoch",
        out=str(tmp_path / "run"),
    )
    longer = tutti.train(model or make(), DATA, **options, optimizer=adam, epochs=4, batch_size=30)
    # The batch size is that of the run.
    module = make()
    again = tutti.train(model or module, DATA, **options, optimizer=adam, epochs=4, resume=tmp_path / "run")
    assert again.config.batch_size == 30
    assert [one.train.loss for one in again.history] == [one.train.loss for one in longer.history]
    assert [one.train.loss for one in again.history[:2]] == [one.train.loss for one in first.history]
    assert (again.model is module) is (given == "module")
    for ours, theirs in zip(again.model.parameters(), longer.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(BadOption, match=r"batch_size=7 \(was 30\)"):
        tutti.train(model or make(), DATA, **options, optimizer=adam, batch_size=7, resume=tmp_path / "run")
