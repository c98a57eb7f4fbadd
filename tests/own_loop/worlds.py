"""Worlds of host ranks that outlive a test, so that hundreds of small programs can be tried on them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from tests.comm.ranks import World
from tests.own_loop.jobs import Loop, Outcome, run_rank
from tutti.comm.base import Communicator
from tutti.own_loop import distribute
from tutti.own_loop.stepper import OwnLoop

ANSWER_S = 40.0
"""How long a small program may take; one that hangs takes longer."""

REST_S = 4.0
"""How long the other ranks have to answer when one has failed."""


class Worlds:
    """A world of each size, started when it is first asked for and replaced when a program breaks it."""

    def __init__(self) -> None:
        self._worlds: dict[int, World] = {}

    def run(self, loop: Loop, size: int) -> list[Outcome]:
        """What `loop` ends with on each rank, as `outcomes` has it."""
        return self.outcomes(partial(run_rank, loop=loop), size)

    def call(self, function: Callable[[Communicator], Outcome], size: int) -> list[Outcome]:
        """What `function` returns on each rank.

        Raises:
            BaseException: what the first rank that failed has raised; the others may wait for it.
        """
        outcomes = self.outcomes(function, size)
        failed = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for error in sorted(failed, key=lambda error: isinstance(error, TimeoutError)):
            raise error
        return outcomes

    def each(self, size: int, program: Callable[..., Outcome], *arguments: Any) -> list[Outcome]:
        """What `program(*arguments)` returns on each rank of a job that has just begun."""
        return self.call(partial(_as_rank, program=program, arguments=arguments), size)

    def outcomes(self, function: Callable[[Communicator], Outcome], size: int) -> list[Outcome]:
        """What `function` returns on each rank; an exception in place of what a rank raised.

        A rank that does not answer in time has a `TimeoutError`.
        """
        world = self._worlds.get(size) or World(size)
        self._worlds[size] = world
        world.start(function)
        outcomes: dict[int, Outcome] = {}
        end = time.monotonic() + ANSWER_S
        while len(outcomes) < size:
            for rank in set(range(size)) - outcomes.keys():
                try:
                    outcomes[rank] = world.outcome(rank, timeout_s=0.005)
                except TimeoutError as error:
                    if time.monotonic() > end:
                        outcomes[rank] = error
                    continue
                except EOFError as error:
                    outcomes[rank] = error
                if isinstance(outcomes[rank], BaseException):
                    end = min(end, time.monotonic() + REST_S)
        if any(isinstance(outcome, BaseException) for outcome in outcomes.values()):
            self._drop(size)
        return [outcomes[rank] for rank in range(size)]

    def close(self) -> None:
        """End all ranks."""
        for size in list(self._worlds):
            self._drop(size)

    def _drop(self, size: int) -> None:
        self._worlds.pop(size).__exit__(None, None, None)


@contextmanager
def job(comm: Communicator) -> Iterator[OwnLoop]:
    """This process is a rank of a job that has just begun."""
    distribute._loop = OwnLoop(comm)
    try:
        yield distribute._loop
    finally:
        distribute._loop = None


def _as_rank(comm: Communicator, program: Callable[..., Outcome], arguments: tuple[Any, ...]) -> Outcome:
    torch.manual_seed(0)
    with job(comm):
        return program(*arguments)
