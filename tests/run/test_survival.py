"""A run survives killed ranks, and ends with the same weights as an undisturbed run."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tutti
from tutti.errors import RankFailed
from tutti.records.checkpoints import FOLDER
from tutti.records.run import EpochRecord
from tutti.records.run_folder import RunFolder

INPUTS = torch.linspace(-1, 1, 240, dtype=torch.float64).reshape(60, 4).sin()
TARGETS = (INPUTS[:, 0] > 0).long()

OPTIONS: dict[str, Any] = {
    "data": (INPUTS, TARGETS),
    "batch_size": 6,
    "epochs": 6,
    "validation": 0.2,
    "precision": "fp64",
    "optimizer": "adam",
    "schedule": "one_cycle",
    "lr": 0.01,
    "clip_norm": 1.0,
    "quiet": True,
}
UPDATES = 8
"""Of an epoch."""


class Killed(tutti.Callback):
    """Kills ranks after steps of the run, each once; `deaths` are pairs of a rank and a step."""

    def __init__(self, folder: Path, deaths: Sequence[tuple[int, int]]) -> None:
        self._folder, self._deaths = folder, deaths

    def step(self, course: tutti.Course) -> None:
        for rank, step in self._deaths:
            note = self._folder / f"{rank}-{step}"
            if rank == course.rank and course.step == step and not note.exists():
                note.touch()
                os.kill(os.getpid(), signal.SIGKILL)


def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 2)).double()


@cache
def left_alone(make: Callable[[], nn.Module] = model) -> torch.Tensor:
    """The weights of an undisturbed rank."""
    return weights_of(tutti.train(make(), workers=1, **OPTIONS))


def weights_of(result: tutti.Result) -> torch.Tensor:
    return torch.cat([one.detach().flatten() for one in result.model.parameters()])


def reading(note: Path) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Return data that note when they are read."""

    def read() -> tuple[torch.Tensor, torch.Tensor]:
        with note.open("a") as file:
            file.write("read\n")
        return INPUTS, TARGETS

    return read


def test_new_ranks_end_with_the_very_weights_of_a_run_that_was_left_alone(tmp_path: Path) -> None:
    alone = tutti.train(model(), workers=2, **OPTIONS)
    deaths = [(1, 1), (0, UPDATES + 3), (1, 3 * UPDATES), (0, 6 * UPDATES - 1)]
    survived = tutti.train(
        model(),
        workers=2,
        callbacks=Killed(tmp_path, deaths),
        on_failure="respawn",
        out=str(tmp_path / "run"),
        **{**OPTIONS, "data": reading(tmp_path / "reads")},
    )
    assert len(list(tmp_path.iterdir())) == len(deaths) + 2
    assert (tmp_path / "reads").read_text() == "read\n"
    assert torch.equal(weights_of(survived), weights_of(alone))
    assert survived.summary.test == alone.summary.test
    assert [one.train for one in survived.history] == [one.train for one in alone.history]
    folder = RunFolder(tmp_path / "run")
    assert [one.epoch for one in folder.lines(EpochRecord).records] == [1, 2, 3, 4, 5, 6]
    assert folder.finished
    assert not (folder.path / FOLDER).exists()


def test_one_rank_fewer_makes_the_same_updates(tmp_path: Path) -> None:
    deaths = [(2, UPDATES + 2), (1, 3 * UPDATES)]
    survived = tutti.train(
        model(), workers=3, callbacks=Killed(tmp_path, deaths), on_failure="shrink", **OPTIONS
    )
    assert len(survived.history[-1].ranks) == 1
    torch.testing.assert_close(weights_of(survived), left_alone(), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("strategy", "servers"), [("downpour", 1), ("hogwild", 0)])
def test_every_kind_of_worker_and_server_is_replaced(tmp_path: Path, strategy: str, servers: int) -> None:
    survived = tutti.train(
        model(),
        strategy=strategy,
        workers=2,
        servers=servers,
        callbacks=Killed(tmp_path, [(1, 5), (0, UPDATES + 1)]),
        on_failure="respawn",
        **OPTIONS,
    )
    assert len(list(tmp_path.iterdir())) == 2
    assert [one.train.samples for one in survived.history] == [48] * 6
    assert survived.history[-1].train.loss < survived.history[0].train.loss


class KillsServer(tutti.Callback):
    """Kills the process that forks ranks, once."""

    def __init__(self, folder: Path) -> None:
        self._note = folder / "hit"

    def step(self, course: tutti.Course) -> None:
        if course.rank == 1 and course.step == 7 and not self._note.exists():
            self._note.touch()
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(60)


def test_all_ranks_are_replaced_if_the_fork_server_is_killed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    survived = tutti.train(
        model(), workers=2, callbacks=KillsServer(tmp_path), on_failure="shrink", **OPTIONS
    )
    torch.testing.assert_close(weights_of(survived), left_alone(), rtol=0, atol=1e-12)
    told = capfd.readouterr().err
    assert "the process that forked all ranks ended: killed by signal 9" in told
    assert "continuing with 2 new ranks" in told


def test_a_run_of_one_worker_is_resumed_with_several(tmp_path: Path) -> None:
    out, options = str(tmp_path / "run"), {**OPTIONS, "epochs": 3, "schedule": None}
    tutti.train(model(), workers=1, out=out, checkpoint="1 epoch", **options)
    longer = tutti.train(model(), workers=2, resume=out, **{**options, "epochs": 6})
    assert longer.config.strategy == "sync"
    straight = tutti.train(model(), workers=1, **{**options, "epochs": 6})
    torch.testing.assert_close(weights_of(longer), weights_of(straight), rtol=0, atol=1e-12)


class FailsAfterLoss(tutti.Callback):
    """Kills rank 1 after an epoch; the next ranks fail."""

    def __init__(self, folder: Path) -> None:
        self._note = folder / "killed"

    def begin(self, course: tutti.Course) -> None:
        if self._note.exists():
            raise RuntimeError("no thread can be started")

    def step(self, course: tutti.Course) -> None:
        if course.rank == 1 and course.step == 2 * UPDATES:
            self._note.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_run_whose_new_ranks_fail_can_be_resumed(tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    with pytest.raises(RankFailed, match="no thread can be started"):
        tutti.train(
            model(), workers=2, on_failure="respawn", out=out, callbacks=FailsAfterLoss(tmp_path), **OPTIONS
        )
    alone = tutti.train(model(), workers=2, **OPTIONS)
    resumed = tutti.train(model(), workers=2, resume=out, callbacks=tutti.Callback(), **OPTIONS)
    assert torch.equal(weights_of(resumed), weights_of(alone))
