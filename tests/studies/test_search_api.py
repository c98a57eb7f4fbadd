"""`tutti.tune`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import tutti
from tests.studies.cv_models import net
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import open_pool
from tutti.errors import UserError
from tutti.records.farm_folder import FarmFolder
from tutti.records.run_folder import RunFolder
from tutti.run.config import TrainConfig
from tutti.studies.arguments import Arguments
from tutti.studies.samples import look_at
from tutti.studies.score import scores_of
from tutti.studies.search.space import space_of
from tutti.studies.search.study import Search, read_search


def test_a_search_from_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((200, 8), dtype=np.float32)
    data, space = (x, (x[:, 0] > 0).astype(np.int64)), {"lr": "log:1e-3..1e-1", "model.width": [2, 16]}
    objective, out = ["accuracy", "parameters"], str(tmp_path / "farm")
    given: dict[str, Any] = {"epochs": 1, "blocks": 2, "out": out, "quiet": True}
    found = tutti.tune(net, data, space, trials=6, objective=objective, **given)
    assert capsys.readouterr().out == ""
    assert len(found.trials) == 6
    assert {row["model.width"]: row["parameters"] for row in found.trials} == {2: 24, 16: 178}
    assert found.values["accuracy"] == max(row["accuracy"] for row in found.trials)
    assert found.config.lr == found.best["lr"]
    assert found.config.model_options == {"width": found.best["model.width"]}
    assert (found.folder, len(found.study.trials)) == (tmp_path / "farm", 6)
    # The data are in the folder once, and no job has a copy.
    assert Path(found.config.data) == tmp_path / "farm" / "data.npz"
    jobs = [RunFolder(job) for job in (tmp_path / "farm" / "jobs").iterdir()]
    assert {job.config()["data"] for job in jobs} == {found.config.data}
    with np.load(found.config.data) as kept:
        assert (kept["x_train"] == x).all()
    search = replace(read_search(FarmFolder.open(found.folder)).search, folds=2)
    assert Search.from_json(search.record()) == search
    monkeypatch.chdir(tmp_path)
    tutti.tune(net, data, space, trials=1, objective="f1", epochs=1, blocks=1, threads=1, quiet=True)
    (unnamed,) = (tmp_path / "farms").iterdir()
    assert "-net-" in unnamed.name


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"space": {"lrr": "0.1..0.2"}}, "did you mean 'lr'"),
        ({"space": {"model.hiden": [1, 2]}}, "did you mean 'hidden'"),
        ({"epoch": 3}, "unknown argument 'epoch'"),
        ({"objective": "own.py:hits"}, "objective does not say .* own.py:hits:higher or own.py:hits:lower"),
        ({"objective": ["loss", "loss:higher"]}, "each once"),
        ({"objective": "mae"}, "the runs have loss, accuracy"),
        ({"pruner": "asha", "steps": 3, "epochs": None}, "^pruner asha .*; give epochs in place of steps"),
        ({"block": "auto"}, "block is auto; give a whole number"),
        ({"stratified": True}, "number of folds is 1"),
        ({"trials": 0}, "number of trials is 0"),
    ],
)
def test_bad_input(changed: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        tutti.tune(**{"model": "mlp", "space": {"lr": "0.1..0.2"}, "epochs": 1, **changed})


@pytest.mark.parametrize(("metrics", "best"), [("auto", "mae"), ("r2", "r2"), ("none", "loss")])
def test_the_objective_is_the_first_metric_of_the_task(metrics: str, best: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.eye(8), y=np.arange(8) / 7)
    config = TrainConfig(model="mlp", data=str(tmp_path / "data.npz"), metrics=metrics)
    search = Search(config, space_of({"lr": [0.1, 0.2]}), scores_of(["auto"], metrics, "objective")[0])
    assert [one.name for one in search.decided(look_at(search.at_ends(), 1).metrics).scores] == [best]


def test_the_data_of_a_farm_have_the_same_test_part(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": np.arange(60.0), "b": 1.0, "p": np.arange(60) // 4, "y": np.arange(60) % 2})
    options = {"target": "y", "group": "p"}
    given = Arguments.of("tune", frame, {"data_options": options})
    np.savez(tmp_path / "kept.npz", **(given.arrays or {}))

    def tested(comm: Any) -> list[list[int]]:
        sources = (frame, options), (str(tmp_path / "kept.npz"), given.config.data_options)
        pools = [open_pool(data, comm, chosen) for data, chosen in sources]
        return [pool.divided(comm, 0.1, 0, test=0.2).test.rows.tolist() for pool in pools]

    ((here, there),) = VirtualWorld(1).run(tested)
    assert here == there
    assert len(here) == 4 * len({row // 4 for row in here}) == 12
