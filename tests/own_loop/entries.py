"""Programs of users on real ranks, each with a job of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

import torch

from tests.comm.ranks import World
from tutti.comm.base import Communicator
from tutti.own_loop import distribute
from tutti.own_loop.loop import OwnLoop
from tutti.own_loop.origins import SampleCounts


class Worlds:
    """Worlds of ranks that are started once for many programs."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def run(self, size: int, program: Callable, *arguments: object) -> list:
        """What `program(*arguments)` returns on each of `size` ranks, or what one of them raises."""
        if size not in self._worlds:
            self._worlds[size] = World(size).__enter__()
        try:
            return self._worlds[size].run(_as_rank, program, arguments)
        except BaseException:
            # The ranks no longer stand at the same place.
            self._worlds.pop(size).__exit__(None, None, None)
            raise

    def __enter__(self) -> Worlds:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for world in self._worlds.values():
            world.__exit__(None, None, None)


@contextmanager
def job(comm: Communicator) -> Iterator[OwnLoop]:
    """This process is a rank of a job that has just begun."""
    distribute._loop = OwnLoop(comm, SampleCounts(1, comm.size))
    try:
        yield distribute._loop
    finally:
        distribute._loop = None


def _as_rank(comm: Communicator, program: Callable, arguments: tuple) -> object:
    torch.manual_seed(0)
    with job(comm):
        return program(*arguments)
