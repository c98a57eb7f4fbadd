"""What a dry run says about memory is what torch's allocator hands out."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping

import pytest
import torch

from tests.comm.ranks import World
from tests.model_parallel.allocated import measure_all
from tests.model_parallel.runs import COMMON, Run
from tutti.cli.main import main
from tutti.comm.shm.communicator import HostCommunicator
from tutti.model_parallel.memory import MemoryNeed, PeakMemory
from tutti.run.config import TrainConfig
from tutti.studies.layouts import work
from tutti.studies.layouts_job import LayoutsJob

BASE: Run = COMMON | {
    "precision": "fp32",
    "validation": 0.0,
    "steps": 3,
    "batch_size": 48,
    "optimizer": "adam",
    "optimizer_options": {},
}
MODELS: dict[str, Run] = {
    "mlp": BASE | {"model": "mlp", "model_options": {"hidden": [700, 600, 500]}},
    "cnn": BASE | {"model": "cnn", "model_options": {"channels": [16, 32], "hidden": 64}},
}
LAYOUTS: dict[str, Run] = {
    "tensor=2": {},
    "pipeline=2": {},
    "pipeline=2 ": {"parallel_options": {"schedule": "gpipe"}},
    "sharded=2": {},
}
RUNS = {
    f"{model} {layout}": config | options | {"parallel": layout.strip()}
    for model, config in MODELS.items()
    for layout, options in LAYOUTS.items()
}


@pytest.fixture(scope="module")
def measured() -> Mapping[str, list[int]]:
    with World(2) as world:
        return world.run(measure_all, pickle.dumps(RUNS))[0]


def advised(config: Run, layout: str | None = None) -> MemoryNeed:
    alone = {name: value for name, value in config.items() if not name.startswith("parallel")}
    options = config.get("parallel_options", {})
    job = LayoutsJob(TrainConfig.from_json(alone), 2, config["parallel"], options)
    comm = HostCommunicator.alone()
    need = work(comm, pickle.dumps(job))[layout or config["parallel"]]
    comm.close()
    assert isinstance(need, MemoryNeed), need
    return need


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", RUNS)
def test_the_advice_is_within_a_tenth_of_the_measurement(
    measured: Mapping[str, list[int]], name: str
) -> None:
    assert advised(RUNS[name]).total == pytest.approx(max(measured[name]), rel=0.1)


def test_a_ledger_counts_what_lives_at_one_time() -> None:
    with PeakMemory() as ledger:
        kept = torch.zeros(100, device="meta")
        for _ in range(3):
            again = kept + 1
            view = again.view(10, 10)
            del again, view
    assert (ledger.peak, ledger.made) == (2 * 400, 4 * 400)


def test_the_command_says_what_each_layout_needs_and_what_cannot_be(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["layouts", "mlp", "-n", "4", "--model.hidden", "3", "--batch-size", "8"]) == 0
    shown = capsys.readouterr().out
    assert "model mlp: 235 parameters" in shown
    for layout in ("1 rank", "data=4", "sharded=4", "data=2,tensor=2", "data=2,pipeline=2"):
        assert f"\n{layout} " in shown
    assert re.search(r"tensor=4 +not possible: layer '1' of the model has 3 outputs", shown)
    assert re.search(r"pipeline=4 +not possible: the model has 2 parts with weights", shown)
