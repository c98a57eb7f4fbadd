"""Programs that the pages on own loops and on losses show do what the pages say, on one rank and on two."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import tutti
from tests.own_loop.worlds import Worlds
from tutti.comm.base import Communicator
from tutti.data import DataSet, Part
from tutti.own_loop import distribute
from tutti.own_loop.loop import OwnLoop
from tutti.training.losses import LossBatch, named_loss

DOCS = Path(__file__).parents[2] / "docs"
COUNT = 23
"""Samples: with batches of 6, the last has 5."""


def block(page: str, beginning: str) -> str:
    """The only block of a page that begins like this."""
    found = re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    (one,) = [text for text in found if beginning in text]
    return str(one)


USUAL = block("own-loop.md", "import tutti\n\nmodel, optimizer = tutti.distribute(model, optimizer)\n")
PLATEAU = block("own-loop.md", "# ReduceLROnPlateau")
SUMS = block("own-loop.md", 'reduction="sum")\nfor')
CHECKPOINTS = block("own-loop.md", 'tutti.checkpoints("')
STOPPING = block("own-loop.md", "with stoppable():")
PER_TOKEN = block("losses.md", "def per_token")
WITH_AID = block("losses.md", "def with_aid")


def test_no_program_of_these_pages_is_left_out() -> None:
    for page, tried in (
        ("own-loop.md", [USUAL, PLATEAU, SUMS, CHECKPOINTS, STOPPING]),
        ("losses.md", [PER_TOKEN, WITH_AID]),
    ):
        assert (DOCS / page).read_text(encoding="utf-8").count("```python") == len(tried)


def test_a_loss_of_everything_is_one() -> None:
    values: dict[str, Any] = {"torch": torch}
    exec(WITH_AID, values)
    batch = LossBatch(torch.zeros(2, 1), torch.tensor([0, 1]))
    loss = values["with_aid"]((torch.zeros(2, 2), torch.ones(2)), batch)
    assert loss.item() == pytest.approx(math.log(2) + 0.1)
    dataset = DataSet("", Part(batch.inputs, batch.targets), None, None, 2, ())
    assert named_loss(values["with_aid"], dataset).whole


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    started = Worlds()
    yield started
    started.close()


def names(batches: int = 6) -> dict[str, Any]:
    """What the programs take for granted, in float64."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(COUNT, 4, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, 3, (COUNT,), generator=generator)
    torch.manual_seed(0)
    model = nn.Linear(4, 3).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(TensorDataset(inputs, targets), batches)
    return {
        "nn": nn,
        "torch": torch,
        "tutti": tutti,
        "model": model,
        "optimizer": optimizer,
        "loader": loader,
        "validation": loader,
        "total": 0.0,
        "samples": 0,
        "scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    }


def plain(program: str) -> str:
    """The same program without tutti."""
    text = re.sub(r"^import tutti\n|^model, optimizer = tutti.*\n", "", program, flags=re.M)
    text = re.sub(r"tutti\.shard\((\w+)\)", r"\1", text)
    text = re.sub(r"tutti\.total\((\(targets != 0\)\.sum\(\))\)", r"\1", text)
    text = re.sub(r"tutti\.mean\((.*), samples\)\)", r"\1)", text)
    assert "tutti" not in text
    return text


def run(program: str, given: Callable[[], dict[str, Any]] = names) -> dict[str, Any]:
    found = given()
    exec(compile(program, "page", "exec"), found)
    return found


def ended(found: dict[str, Any]) -> tuple[list[Tensor], float]:
    """The weights at the end, and the best loss that the scheduler was told."""
    return [p.detach().clone() for p in found["model"].parameters()], float(found["scheduler"].best)


def _on_rank(comm: Communicator, program: str) -> tuple[list[Tensor], float]:
    distribute._loop = OwnLoop(comm)
    try:
        return ended(run(program))
    finally:
        distribute._loop = None


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("program", [USUAL, PLATEAU, SUMS], ids=["usual", "plateau", "sums"])
def test_a_program_ends_as_the_one_with_plain_torch(worlds: Worlds, program: str, size: int) -> None:
    weights, best = ended(run(plain(program)))
    before, nothing_told = ended(names())
    moved = not torch.equal(weights[0], before[0])
    assert moved == (program is not PLATEAU)
    assert (best != nothing_told) == (program is PLATEAU)
    for found in worlds.call(partial(_on_rank, program=program), size):
        for mine, wanted in zip(found[0], weights, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)
        assert found[1] == pytest.approx(best, rel=1e-12)


def _saved_on_rank(comm: Communicator, program: str) -> tuple[list[Tensor], list[Any]]:
    """The weights at the end; what it went on from, the steps then, and those with the loop to be stopped."""
    distribute._loop = OwnLoop(comm)
    try:
        found = run(program)
        weights, steps = ended(found)[0], found["step"]
        exec(compile(STOPPING, "page", "exec"), found)
        found["run"].close()
        return weights, [found["run"].values, steps, found["step"]]
    finally:
        distribute._loop = None


@pytest.mark.parametrize("size", [1, 2])
def test_a_program_that_is_started_again_ends_as_if_it_had_never_stopped(
    worlds: Worlds, tmp_path: Path, size: int
) -> None:
    program = CHECKPOINTS.replace("runs/digits", str(tmp_path)).replace("% 500", "% 10")
    program = program.replace("epoch=epoch", "epoch=epoch, wait=True")
    worlds.call(partial(_saved_on_rank, program=program.replace("0), 10)", "0), 3)")), size)
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000010"]
    wanted = names()
    for _ in range(10):
        exec(compile(plain(USUAL), "page", "exec"), wanted)
    for weights, facts in worlds.call(partial(_saved_on_rank, program=program), size):
        assert facts == [{"epoch": 2}, 40, 44]
        for mine, other in zip(weights, ended(wanted)[0], strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_a_loss_with_a_denominator_is_a_mean_over_the_tokens_that_count() -> None:
    per_token = run(PER_TOKEN)["per_token"]
    outputs = torch.randn(5, 3, 7, dtype=torch.float64)
    targets = torch.arange(35).reshape(5, 7) % 3
    wanted = nn.functional.cross_entropy(outputs, targets, ignore_index=0)
    total, weight = per_token(outputs, targets)
    assert (total / weight).item() == pytest.approx(wanted.item(), rel=1e-12)
    assert 0 < weight < 35
