"""A process group whose ranks are on several hosts, joined by MPI."""

import json
import os
import sys
from pathlib import Path

import pytest
from torch import distributed

from backend.process_groups import Ranks
from cluster.hosts import Hosts, why_not
from mpi.mpirun import MPIRUN, SETTINGS, needs_mpirun, run

PROGRAM = Path(__file__).with_name("on_several_hosts.py")


def on_hosts(hosts):
    """What each rank found."""
    command = [str(MPIRUN), "--oversubscribe", "-n", str(len(hosts)), sys.executable, str(PROGRAM), hosts]
    if os.geteuid() == 0:
        command.insert(1, "--allow-run-as-root")
    outcome = run(command, {**SETTINGS, "OMPI_MCA_btl": "self,sm"}, 110)
    assert outcome.returncode == 0, outcome.stderr
    return json.loads(outcome.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def found():
    return on_hosts("aab")


pytestmark = [needs_mpirun, pytest.mark.mpi]


def test_all_operations_come_out_as_with_gloo(found):
    assert [one["alike"] for one in found] == [True] * 3


def test_a_group_of_some_ranks_works_across_hosts(found):
    assert [one["half"] for one in found] == [2.0, 1.0, 2.0]


def test_an_average_of_short_floats_is_right(found):
    assert [one["mean"] for one in found] == [[1.0] * 3] * 3


def test_a_mismatched_call_is_named_on_all_ranks(found):
    for one in found:
        assert "(sum, 2 x torch.float32)" in one["mismatch"]
        assert "(sum, 3 x torch.float32)" in one["mismatch"]


def test_ddp_reaches_equal_weights_everywhere(found):
    assert found[0]["weights"] == found[1]["weights"] == found[2]["weights"]


@pytest.mark.cluster
def test_hosts_with_names_and_networks_of_their_own_add_up():
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Hosts(["a", "b"]) as hosts:
        program = [sys.executable, str(PROGRAM.with_name("summing.py"))]
        outcome = hosts.mpirun({"a": 1, "b": 2}, ["env", "MASTER_ADDR=a", *program])
    assert outcome.returncode == 0, outcome.stderr
    lines = outcome.stdout.splitlines()
    assert sorted(line for line in lines if " of 3: " in line) == [f"{rank} of 3: 6.0" for rank in range(3)]


def test_without_mpi_several_hosts_are_refused_with_a_remedy():
    def join(rank):
        from tutti.backend import group

        group.host_key = lambda: f"host{rank}"
        try:
            distributed.new_group()
        except RuntimeError as error:
            return str(error)
        return ""

    with Ranks(2) as ranks:
        for said in ranks.run(join):
            assert "the ranks are on several hosts (host0, host1)" in said
            assert "it was not started by mpirun or srun. Start them all with the mpirun" in said
