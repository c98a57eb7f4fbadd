"""How the ranks of a group find each other: through the store that torch gives them, then in shared memory.

rank 0   store: host, arena ──┐                          ┌── all could open it ──▶ go on
rank 1   store: host ─────────┴ opens /proc/PID/fd/N ────┴── somebody could not ─▶ all say so
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from tutti.backend.failures import Absent, Unusable
from tutti.backend.rows import rows_bytes
from tutti.comm.arena import Arena
from tutti.comm.control import Layout, control_bytes

_FINE = "fine"


class Place(NamedTuple):
    """Where a group's shared memory is: its control block, and its rows."""

    arena: Arena
    block: int
    rows: int
    words: memoryview


class Registry:
    """What the ranks of a group tell each other through a store.

    A store may outlive a group (torchrun keeps its own), and the next group may have the same name: each
    generation of a group has keys of its own.
    """

    def __init__(self, store: Store, rank: int, names: Sequence[int], timeout_s: float) -> None:
        generation = store.add(f"generation/{rank}", 1)
        self._store = PrefixStore(f"tutti/{generation}", store)
        self._rank, self._names = rank, tuple(names)
        self._deadline = time.monotonic() + timeout_s
        self._timeout_s = timeout_s

    def tell(self, what: str, value: str) -> None:
        """Say something to the others."""
        self._store.set(f"{what}/{self._rank}", value)

    def ask(self, what: str, rank: int) -> str:
        """What a rank says; waits for it.

        Raises:
            Absent: it did not say so in time.
        """
        left_s = max(0.001, self._deadline - time.monotonic())
        key = f"{what}/{rank}"
        try:
            self._store.wait([key], timedelta(seconds=left_s))
        except RuntimeError as error:
            if time.monotonic() < self._deadline:
                raise
            raise Absent("init_process_group", [self._names[rank]], self._timeout_s) from error
        found: bytes = self._store.get(key)
        return found.decode()

    def gather(self, what: str, value: str) -> list[str]:
        """What each rank says, in rank order."""
        self.tell(what, value)
        return [self.ask(what, rank) for rank in range(len(self._names))]


def host_key() -> str:
    """Equal for processes that can share memory: one kernel, one view of its processes, one name."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{socket.gethostname()} {boot} {os.readlink('/proc/self/ns/pid')}"


def share(registry: Registry, rank: int, size: int) -> Place:
    """Make, or find, the shared memory of ranks that are all on one host (collective).

    Raises:
        Unusable: a rank cannot open what another one made.
        Absent: a rank did not come.
    """
    if rank == 0:
        arena = Arena.create()
        block, rows = arena.allocate(control_bytes(size)), arena.allocate(rows_bytes(size))
        registry.tell("arena", f"{block} {rows} {arena.path}")
        outcome = _FINE
    else:
        control, memory, path = registry.ask("arena", 0).split(" ", 2)
        block, rows, outcome = int(control), int(memory), _FINE
        try:
            arena = Arena.open(path)
        except (OSError, ValueError) as error:
            arena, outcome = Arena.create(), str(error)
    outcomes = registry.gather("opened", outcome)
    for other, said in enumerate(outcomes):
        if said != _FINE:
            arena.close()
            raise Unusable(
                f"rank {other} cannot open the shared memory of rank 0: {said}; start all ranks of a host as "
                "one user, in one container"
            )
    return Place(arena, block, rows, arena.words(block, Layout(size).words))
