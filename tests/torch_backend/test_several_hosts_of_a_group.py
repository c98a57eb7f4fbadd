"""A process group whose ranks are on several hosts, joined by MPI."""

import json
from pathlib import Path

import pytest
import torch
from torch import distributed

from tests.cluster.hosts import Hosts, why_not
from tests.mpi.mpirun import mpirun, needs_mpirun, results
from tests.preloaded import interpreter
from tests.torch_backend.process_groups import Ranks

PROGRAM = Path(__file__).with_name("on_several_hosts.py")
LEAVING = PROGRAM.with_name("leaving.py")


@pytest.fixture(scope="module", params=["aab", "abcb"])
def found(request):
    """The results of each rank."""
    outcome = mpirun(len(request.param), PROGRAM, request.param)
    assert outcome.returncode == 0, outcome.stderr
    return json.loads(outcome.stdout.splitlines()[-1])


pytestmark = [needs_mpirun, pytest.mark.mpi]


def test_all_operations_come_out_as_with_gloo(found):
    assert [one["alike"] for one in found] == [True] * len(found)


def test_a_group_of_some_ranks_works_across_hosts(found):
    assert [one["half"] for one in found] == [2.0, *[1.0] * (len(found) - 2), 2.0]


def test_an_average_of_short_floats_is_right(found):
    assert [one["mean"] for one in found] == [[len(found) - 1.0] * 3] * len(found)


def test_sums_of_short_floats_are_rounded_once(found):
    total = float(torch.tensor(255.0 + len(found)).bfloat16())
    assert total > 256.0
    for one in found:
        assert one["rounded once"] == [total] * (3 * len(found) + 3)


def test_sums_are_bit_equal_on_all_ranks(found):
    assert len({one["digest"] for one in found}) == 1


def lost(outcome):
    """The ranks that each rank reports lost, by its number."""
    assert not [one for one in results(outcome) if one["after_s"] > 10.0], outcome.stdout
    return {one["rank"]: one["lost"] for one in results(outcome)}


@pytest.mark.parametrize(("leaves", "waits"), [("destroys", "all_reduce"), ("ends", "recv")])
def test_a_rank_of_another_host_that_leaves_too_early_is_named_at_once(leaves, waits):
    outcome = mpirun(3, LEAVING, "abb", leaves, waits)
    assert lost(outcome) == {0: [2], 1: [2]}, outcome.stderr


def test_ddp_reaches_equal_weights_everywhere(found):
    assert all(one["weights"] == found[0]["weights"] for one in found)


@pytest.mark.cluster
def test_hosts_with_names_and_networks_of_their_own_add_up():
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Hosts(["a", "b"]) as hosts:
        program = [*interpreter(), str(PROGRAM.with_name("summing.py"))]
        outcome = hosts.mpirun({"a": 1, "b": 2}, program)
    assert outcome.returncode == 0, outcome.stderr
    lines = outcome.stdout.splitlines()
    assert sorted(line for line in lines if " of 3: " in line) == [f"{rank} of 3: 6.0" for rank in range(3)]


def test_without_mpi_several_hosts_are_refused_with_a_remedy():
    def join(rank):
        from tutti.torch_backend import group

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
