"""Running a function on the ranks of a launcher that tutti is not."""

from __future__ import annotations

import pytest
import torch

from tutti.comm.shm.communicator import HostCommunicator
from tutti.launch import start
from tutti.launch.cores import Cores


@pytest.mark.parametrize(("servers", "said"), [(0, "2 threads: they take turns"), (1, "")])
def test_ranks_that_their_launcher_has_crowded_are_warned_unless_some_are_servers(
    servers: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(start, "allowed_cores", lambda: Cores(((0,),)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    comm = HostCommunicator.alone()
    start._warn_of_crowding(comm, servers)
    comm.close()
    written = capsys.readouterr().err
    assert said in written
    assert bool(written) == bool(said)
