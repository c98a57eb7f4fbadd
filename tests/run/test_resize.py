"""A run is resized while it trains, and ends as if it had always had the new number of ranks."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import tutti
from tests.run.test_survival import OPTIONS, left_alone, model, weights_of
from tutti.errors import BadOption, BadRunFolder
from tutti.records.folder_lock import FolderLock
from tutti.records.heartbeat import TRAINING, Heartbeat
from tutti.records.resize_request import REQUEST, answer_request, read_request
from tutti.records.run import RunStart, Summary, ranks_in_turn
from tutti.records.run_folder import RunFolder
from tutti.run.config import TrainConfig
from tutti.run.resize import resize


class Waits(tutti.Callback):
    """Notes in a folder at `steps` that a resize is due; steps take long until it is requested."""

    def __init__(self, notes: Path, steps: Iterable[int]) -> None:
        self._notes, self._steps = notes, list(steps)
        self._waited = 0

    def step(self, course: tutti.Course) -> None:
        for step in self._steps if course.rank == 0 else []:
            if course.step >= step and not (self._notes / f"asked-{step}").exists():
                (self._notes / f"due-{step}").touch()
                self._waited += 1
                time.sleep(0.25 if self._waited < 8 else 4)  # There are only so many steps.
                return


def ask_in_turn(out: Path, notes: Path, sizes: Mapping[int, int]) -> None:
    """Ask for other numbers of workers, one after the other, and note what is refused."""
    for step, workers in sizes.items():
        while not (notes / f"due-{step}").exists():
            time.sleep(0.01)
        refused = ""
        try:
            resize(out, workers)
        except BadOption as error:
            refused = str(error)
        unfinished = notes / "unfinished"
        unfinished.write_text(refused)
        unfinished.rename(notes / f"asked-{step}")


def resized_run(tmp_path: Path, sizes: Mapping[int, int], **options: Any) -> tuple[tutti.Result, list[int]]:
    """Train; returns the result, and the ranks of each start of the run."""
    out = tmp_path / "run"
    given = {**OPTIONS, "on_failure": "respawn", "workers": 2, **options}
    callbacks = [Waits(tmp_path, sizes), *given.pop("callbacks", [])]
    threading.Thread(target=ask_in_turn, args=(out, tmp_path, sizes), daemon=True).start()
    result = tutti.train(given.pop("make", model)(), callbacks=callbacks, out=str(out), **given)
    assert not (out / REQUEST).exists()
    return result, [start.world.ranks for start in RunFolder(out).lines(RunStart).records]


def test_more_and_fewer_ranks_make_the_same_updates(tmp_path: Path) -> None:
    sizes = {3: 3, 4: 1, 5: 2}
    found, ranks = resized_run(tmp_path, sizes)
    assert ranks == [2, 3, 1, 2]
    torch.testing.assert_close(weights_of(found), left_alone(), rtol=0, atol=1e-12)
    assert [one.train.samples for one in found.history] == [48] * 6
    assert len(found.history[-1].ranks) == 2
    folder = RunFolder(tmp_path / "run")
    in_turn = folder.read(Summary).ranks_in_turn
    assert in_turn == ranks_in_turn(folder.lines(RunStart).records)
    assert in_turn[0] == in_turn[-1] == 2
    # A resumed run has the same number.
    assert found.config.workers == "2"


@pytest.mark.parametrize(("strategy", "servers"), [("hogwild", 0), ("downpour", 1)])
def test_every_kind_of_worker_may_come_and_go(tmp_path: Path, strategy: str, servers: int) -> None:
    options = {"strategy": strategy, "servers": servers}
    found, ranks = resized_run(tmp_path, {3: 3, 4: 1}, **options)
    assert ranks == [2, 3, 1]
    assert [one.epoch for one in found.history] == [1, 2, 3, 4, 5, 6]
    assert [one.train.samples for one in found.history] == [48] * 6
    assert weights_of(found).isfinite().all()


def test_ranks_that_could_not_train_are_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found, ranks = resized_run(tmp_path, {3: 7, 4: 2})
    assert ranks == [2]
    said = {note.name: note.read_text() for note in tmp_path.glob("asked-*")}
    assert "batch" in said["asked-3"]
    assert "a request for 7 ranks was refused: " in capfd.readouterr().err
    assert said["asked-4"] == ""
    assert torch.equal(weights_of(found), weights_of(tutti.train(model(), workers=2, **OPTIONS)))


def test_a_run_that_has_ended_or_cannot_change_is_not_resized(tmp_path: Path) -> None:
    for place in (tmp_path / "nowhere", tmp_path):
        with pytest.raises(BadRunFolder, match=r"has no config\.json; .* ask again once it trains"):
            resize(place, 2)
    run = tmp_path / "a run"
    tutti.train(model(), workers=1, checkpoint="1 epoch", out=str(run), **OPTIONS)
    with pytest.raises(BadRunFolder, match=r"has finished"):
        resize(run, 2)
    (run / "summary.json").unlink()
    # It has left the heartbeat of one that has stopped.
    with pytest.raises(BadRunFolder, match=r"continue it by: tutti train --resume '.*' -n 2"):
        resize(run, 2)
    with (
        FolderLock(run),
        pytest.raises(BadOption, match=r"keeps no copies .*\. Stop it, by .* -n 2 --on-failure respawn"),
    ):
        resize(run, 2)
    assert not (run / REQUEST).exists()


def test_a_run_can_be_resized_while_its_ranks_are_replaced(tmp_path: Path) -> None:
    """Nobody has the lock for a moment, but ranks gave a sign a moment ago."""
    RunFolder.take(tmp_path).write_config(TrainConfig("mlp", data="digits", on_failure="respawn").as_json())
    RunFolder(tmp_path).write_heartbeat(Heartbeat(0, "here", 1, time.time(), TRAINING))
    said = list[str]()
    asking = threading.Thread(target=lambda: said.append(resize(tmp_path, 3)))
    asking.start()
    while (request := read_request(tmp_path)) is None:
        assert asking.is_alive()
    answer_request(tmp_path, request, "so be it", agreed=True)
    asking.join()
    assert said == ["so be it"]
    # Its ranks were killed, and nobody has come after them.
    RunFolder(tmp_path).write_heartbeat(Heartbeat(0, "here", 1, time.time() - 121, TRAINING))
    with pytest.raises(BadRunFolder, match="does not train now"):
        resize(tmp_path, 3)
