"""Training and loops of one's own whose ranks torchrun has started."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed.run
from safetensors.torch import load_file

import tutti
from tests.ports import held_ports
from tests.preloaded import HERE, interpreter

LOOP = str(Path(__file__).with_name("under_torchrun.py"))
TRAINING = ("mlp", "--data", "digits", "--steps", "4", "--threads", "1")
LIMIT_S = 110


def command() -> list[str]:
    return [*interpreter(), str(HERE / "command.py")]


def torchrun(*words: str) -> subprocess.Popen[str]:
    command = [*interpreter(), torch.distributed.run.__file__, "--nproc-per-node", "2", "--no-python", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def outputs(started: Sequence[subprocess.Popen[str]]) -> list[str]:
    found = []
    for one in started:
        out, err = one.communicate(timeout=LIMIT_S)
        assert one.returncode == 0, err
        found.append(out)
    return found


def test_torchrun_trains_on_two_ranks(tmp_path: Path) -> None:
    folder = tmp_path / "under"
    words = ("--standalone", *command(), "train", *TRAINING, "--out", str(folder))
    (said,) = outputs([torchrun(*words)])
    assert "2 ranks x 1 thread, started by torchrun" in said
    own = tmp_path / "own"
    tutti.train("mlp", "digits", steps=4, workers=2, threads=1, out=str(own), quiet=True)
    weights = load_file(own / "weights.safetensors")
    found = load_file(folder / "weights.safetensors")
    assert all(torch.equal(found[name], value) for name, value in weights.items())


def test_a_custom_loop_meets_over_two_launches_of_torchrun() -> None:
    with held_ports(1) as (port,):
        where = ("--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", str(port))
        started = [torchrun(*where, "--node-rank", str(node), *interpreter(), LOOP) for node in range(2)]
        said = "".join(outputs(started))
    assert sorted(said.splitlines()) == [f"{rank} of 4: 10.0" for rank in range(4)]
