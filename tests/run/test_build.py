"""Tests of how the parts of a run are built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.data import Batches
from tutti.data.parts import DataSet, Part
from tutti.errors import BadOption
from tutti.replica import Replica
from tutti.run.build import build_model, deal, graph_of, open_config_data, seeded, trained_on
from tutti.run.config import TrainConfig
from tutti.run.train_job import TrainJob
from tutti.strategies import EASGD, Local, Solo, Strategy, Sync
from tutti.training.evaluation import Objective
from tutti.training.losses import Loss

DRAWING = """
import torch

DRAWN = torch.rand(3)


def net(shape, outputs):
    return torch.nn.Linear(shape[0], outputs)
"""


def test_the_first_weights_do_not_depend_on_when_a_file_is_imported(tmp_path: Path) -> None:
    file = tmp_path / "drawing.py"
    file.write_text(DRAWING)
    job = TrainJob(TrainConfig(model=f"{file}:net"))
    data = DataSet("two", Part(torch.zeros(2, 3), torch.tensor([0, 1])), None, None, 2, ())
    with seeded(0):
        first, again = (build_model(job, data).state_dict() for _ in range(2))
    assert torch.equal(first["weight"], again["weight"])


@pytest.mark.parametrize("strategy", [Solo(), Sync(), Local(), EASGD()], ids=lambda one: one.name)
def test_any_strategy_accumulates_over_the_configured_passes(strategy: Strategy) -> None:
    config, part = TrainConfig(batch_size=8, accumulate=4), Part(torch.zeros(19, 3), torch.zeros(19))

    def program(comm: Communicator) -> list[list[int]]:
        batches, _ = deal(config, strategy, part, comm, None)
        return [[len(one.targets) for one in passes] for _, passes in batches.epoch(0)]

    together = strategy.name in ("solo", "sync")
    ranks = 1 if strategy.name == "solo" else 2
    found = VirtualWorld(ranks).run(program)
    assert all(len(update) == 4 for mine in found for update in mine)
    assert sum(found[0][0]) == (8 // ranks if together else 8)
    assert sum(sum(update) for mine in found for update in mine) == 19


def test_a_loss_with_a_denominator_of_its_own_is_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = Batches(Part(torch.zeros(4, 2), torch.zeros(4)), 4)
    monkeypatch.setattr(Part, "device", property(lambda _: torch.device("cuda")))
    own = Loss("own", lambda outputs, targets: (outputs.sum(), 4), weighed=True)
    rest: Any = Objective(own), Replica(nn.Linear(2, 1)), batches
    assert graph_of(TrainConfig(cuda_graph="auto"), *rest) is None
    with pytest.raises(BadOption, match=r"use --cuda-graph off"):
        graph_of(TrainConfig(cuda_graph="on", device="cuda"), *rest)


@pytest.mark.parametrize(("model", "categories"), [("told", (36,)), ("plain", ())])
def test_models_that_take_a_table_get_category_numbers(
    tmp_path: Path, model: str, categories: tuple[int, ...]
) -> None:
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n\n"
        "def told(shape, outputs, table):\n    return nn.Linear(table.width, outputs)\n\n"
        "def plain(shape, outputs):\n    return nn.Linear(shape[0], outputs)\n"
    )
    rows = "".join(f"{n % 7},t{n % 35},{n % 2}\n" for n in range(210))
    (tmp_path / "a.csv").write_text("a,t,y\n" + rows)
    config = TrainConfig(model=f"{tmp_path}/nets.py:{model}", data=str(tmp_path / "a.csv"), validation=0.0)
    (data,) = VirtualWorld(ranks=1).run(lambda comm: open_config_data(TrainJob(config), comm))
    assert data.table_inputs is not None
    assert data.table_inputs.categories == categories
    assert trained_on(data).table == data.table_inputs
    module = build_model(TrainJob(config), data)
    assert module(data.train.take(torch.arange(5))[0]).shape == (5, 2)
