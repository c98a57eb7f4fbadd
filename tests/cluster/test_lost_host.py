"""A run that loses a host goes on with a spare one, and ends with the weights of an undisturbed run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.cluster.hosts import Hosts, why_not
from tests.mpi.mpirun import needs_mpirun
from tutti.exports.sources import read_from

pytestmark = [pytest.mark.cluster, pytest.mark.mpi, needs_mpirun, pytest.mark.timeout(400)]

TRAIN = (
    *("train", "mlp", "--model.hidden", "16", "--data", "digits", "--epochs", "6"),
    *("--batch-size", "256", "--precision", "fp64"),
)


def test_a_host_that_stands_by_takes_the_place_of_one_without_power(tmp_path: Path) -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    alone, survived = tmp_path / "alone", tmp_path / "survived"
    tutti = [sys.executable, "-m", "tutti", *TRAIN]
    subprocess.run([*tutti, "-n", "2", "--out", str(alone)], check=True, capture_output=True, timeout=200)
    with Hosts(["a", "b", "c"], apart=True) as hosts:
        arguments = shlex.join(word for word in hosts.mpirun_arguments if word != "--allow-run-as-root")
        placed = ["--hosts", "a:1,b:1,c:1", "-n", "2", "--on-failure", "respawn", "--out", str(survived)]
        environment = {**os.environ, **hosts.settings, "TUTTI_MPIRUN_ARGS": arguments}
        said = []
        with subprocess.Popen(
            hosts.on("a", [*tutti, *placed]),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        ) as program:
            assert program.stdout is not None
            for line in program.stdout:
                said.append(line)
                if re.match(r"\s*epoch +2/6", line):
                    hosts.kill("b")
        assert program.returncode == 0, "".join(said)
        assert [host for host in hosts.names if hosts.processes(host)] == []
    text = "".join(said)
    assert "lost host b: it cannot be reached any more; going on with 2 ranks on 2 hosts (a: 1, c: 1)" in text
    assert "resumed after step" in text
    # On one host the same sums are made in another order.
    before, after = (read_from(folder).weights for folder in (alone, survived))
    torch.testing.assert_close(after, before, rtol=0, atol=1e-12)
