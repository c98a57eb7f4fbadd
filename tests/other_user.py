"""Calls functions as another user of this host, which only root can."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import pytest

NOBODY = 65534

needs_another_user = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


class Result:
    """The result of a function that another process calls."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def result(self) -> Any:
        """Wait for what it returns, or raise what it raises."""
        assert self._connection.poll(60), "the other user does not come to an end"
        value, error = cloudpickle.loads(self._connection.recv_bytes())
        if error is not None:
            raise error
        return value


@contextmanager
def as_another_user(function: Callable[..., object], *arguments: object) -> Iterator[Result]:
    """Call a function in a fork of this process that belongs to nobody; it lives while the context lasts."""
    ours, theirs = multiprocessing.Pipe()
    process = os.fork()
    if process == 0:
        try:
            os.setgroups([])
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            theirs.send_bytes(cloudpickle.dumps((function(*arguments), None)))
        except BaseException as error:
            theirs.send_bytes(cloudpickle.dumps((None, error)))
        try:
            ours.close()
            theirs.recv_bytes()
        finally:
            os._exit(0)
    theirs.close()
    try:
        yield Result(ours)
    finally:
        ours.close()
        os.waitpid(process, 0)
