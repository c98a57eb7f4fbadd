"""The exposure of a run to other users: no port, and no way to have a rank map a file of theirs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import psutil
import pytest
from torch.distributed import HashStore

from tests.comm.ranks import World
from tests.preloaded import command
from tutti.comm.base import Communicator
from tutti.comm.mpi.discovery import join_host
from tutti.errors import UserError
from tutti.model_parallel.group import TeamMesh
from tutti.torch_backend.rendezvous import GroupStore

PROGRAM = Path(__file__).with_name("listening.py")
LIMIT_S = 110


def listening() -> list[tuple[str, int]]:
    """The addresses at which this process can be reached."""
    found = [one for one in psutil.Process().net_connections("inet") if one.status == psutil.CONN_LISTEN]
    return [tuple(one.laddr) for one in found]


def hold_a_model_together(comm: Communicator) -> tuple[int, list[tuple[str, int]]]:
    group = TeamMesh(comm, comm.size)
    try:
        return group.team.size(), listening()
    finally:
        group.close()


def test_ranks_that_hold_a_model_together_listen_nowhere() -> None:
    with World(2) as world:
        assert world.run(hold_a_model_together) == [(2, []), (2, [])]


def lines_of(outcome: subprocess.CompletedProcess[str]) -> list[str]:
    assert outcome.returncode == 0, outcome.stderr
    return sorted(line[line.index("sum") :] for line in outcome.stdout.splitlines() if "sum" in line)


def test_ranks_of_tutti_run_find_each_other_and_listen_nowhere() -> None:
    words = ["run", "-n", "2", str(PROGRAM)]
    outcome = subprocess.run(
        [*command(), *words], timeout=LIMIT_S, capture_output=True, text=True, check=False
    )
    assert lines_of(outcome) == ["sum 3.0 3.0 listening []"] * 2


def test_a_file_that_somebody_else_names_in_the_store_is_not_mapped(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.write_bytes(b"\0" * (1 << 20))
    store = HashStore()
    with open(theirs, "r+b") as file:
        of_rank_0 = GroupStore(store, 0, (0, 1), timeout_s=5, check=lambda rank: None)._store
        of_rank_0.set("1/0", f"{os.getpid()} {file.fileno()}")
        of_rank_0.set("2/0", "")
        gather = GroupStore(store, 1, (0, 1), timeout_s=5, check=lambda rank: None).gather
        with pytest.raises(UserError, match="theirs"):
            join_host(1, ["here", "here"], gather, (0, 1))
    assert not theirs.read_bytes().strip(b"\0")
    assert "theirs" not in Path("/proc/self/maps").read_text()
