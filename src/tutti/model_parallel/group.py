"""torch.distributed among the ranks of a communicator, for DTensor, FSDP2 and pipelines."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Final, cast

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tutti.comm.base import Communicator
from tutti.comm.shm.memfd import make_for_all
from tutti.errors import BadOption

BACKEND: Final = "tutti"
"""The process groups' backend."""

PATIENCE: Final = timedelta(minutes=30)
"""Patience of a rank with another; the launcher notices one that is gone much earlier."""


class TeamMesh:
    """The process group of all ranks, and its mesh of (teams, ranks of a team) (collective)."""

    def __init__(self, comm: Communicator, team: int) -> None:
        if dist.is_initialized():
            raise BadOption(
                "--parallel needs torch.distributed, which this program has initialised already; call "
                "torch.distributed.destroy_process_group() before training"
            )
        store = _store(comm)
        dist.init_process_group(BACKEND, store=store, rank=comm.rank, world_size=comm.size, timeout=PATIENCE)
        mesh = init_device_mesh("cpu", (comm.size // team, team), mesh_dim_names=("data", "team"))
        self.team: DeviceMesh = mesh["team"]

    def close(self) -> None:
        """End the process groups (collective)."""
        dist.destroy_process_group()


def _store(comm: Communicator) -> Store:
    """Return the store where ranks meet: on one host in a file, else at a port of rank 0's."""
    if comm.hosts == 1:
        return FileStore(f"/proc/self/fd/{make_for_all('store', comm)}", comm.size)
    host = socket.gethostname()
    server = TCPStore(host, 0, comm.size, is_master=True, wait_for_workers=False) if comm.rank == 0 else None
    address = comm.broadcast_object(None if server is None else (host, server.port))
    if server is not None:
        return server
    where, port = cast("tuple[str, int]", address)
    return TCPStore(where, port, comm.size, is_master=False)
