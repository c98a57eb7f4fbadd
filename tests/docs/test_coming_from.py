"""The page for users of other libraries: its programs compute what plain torch computes."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tutti
from tests.docs.programs import blocks_of
from tests.own_loop.worlds import Worlds
from tests.preloaded import command
from tutti.comm.base import Communicator
from tutti.own_loop import distribute
from tutti.own_loop.loop import OwnLoop
from tutti.run.config import TrainConfig

BLOCKS = blocks_of("coming-from.md")
(SETTING,) = [block.code for block in BLOCKS if block.language == "python"]


def ours(diff: str) -> str:
    """A program with the lines that come, and without those that go."""
    lines = [line for line in diff.splitlines() if not line.startswith("-")]
    assert all(line[:1] in ("", " ", "+") for line in lines)
    return "".join(line[1:] + "\n" for line in lines)


PROGRAMS = [ours(block.code) for block in BLOCKS if block.language == "diff"]
LOOPS = [program for program in PROGRAMS if "tutti.distribute" in program]
TRAINED = [program for program in PROGRAMS if "tutti.train(" in program]
(GROUP,) = [program for program in PROGRAMS if "init_process_group" in program]


def test_every_program_is_tried() -> None:
    assert (len(LOOPS), len(TRAINED)) == (3, 2)
    assert len(PROGRAMS) == len(LOOPS) + len(TRAINED) + 1


def test_no_line_of_another_library_is_left() -> None:
    others = r"\b(hvd|horovod|lightning|accelerat\w+|ray|DistributedSampler|sampler)\b"
    assert [program for program in PROGRAMS if re.search(others, program)] == []


def plain(program: str) -> str:
    """The same program without tutti."""
    text = re.sub(r"^import tutti\n|^model, optimizer = tutti.*\n", "", program, flags=re.M)
    text = re.sub(r"^correct, total = tutti\.total.*\n", "", text, flags=re.M)
    text = re.sub(r"tutti\.shard\((\w+)\)", r"\1", text).replace("tutti.init().rank == 0", "True")
    assert "tutti" not in text
    return text


def run(program: str, folder: Path) -> tuple[list[Tensor], object]:
    """The weights at the end of a program, and what it has counted; in float64."""
    os.chdir(folder)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        names: dict[str, Any] = {}
        exec(compile(SETTING + program, "page", "exec"), names)
    finally:
        torch.set_default_dtype(before)
    weights = [parameter.detach().clone() for parameter in names["model"].parameters()]
    return weights, (names.get("correct"), names.get("total"))


def on_rank(comm: Communicator, program: str, folder: Path) -> tuple[list[Tensor], object]:
    distribute._loop = OwnLoop(comm)
    try:
        return run(program, folder)
    finally:
        distribute._loop = None


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    started = Worlds()
    yield started
    started.close()


@pytest.mark.parametrize("program", LOOPS, ids=["horovod", "ddp", "accelerate"])
def test_a_loop_ends_on_two_ranks_as_plain_torch_does(
    program: str, worlds: Worlds, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    weights, counted = run(plain(program), tmp_path)
    for found, count in worlds.call(partial(on_rank, program=program, folder=tmp_path), 2):
        assert count == counted
        for mine, wanted in zip(found, weights, strict=True):
            torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("program", TRAINED, ids=["lightning", "ray"])
def test_a_call_of_train_has_arguments_that_there_are(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(tutti, "train", lambda *_, **given: seen.append(given))
    exec(compile(SETTING + program, "page", "exec"), {})
    (given,) = seen
    assert TrainConfig.from_json({**given, "workers": str(given["workers"])}).epochs == 2


def test_a_program_that_keeps_ddp_runs_on_two_ranks(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        SETTING + GROUP + "model(dataset[:8][0]).sum().backward()\nprint(dist.get_world_size())\n"
    )
    words = [*command(), "run", "-n", "2", "--no-prefix", "train.py"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "2"]
