"""A process that multiprocessing starts anew is forked, and is to its parent what it would have been."""

from __future__ import annotations

import sys
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest

CODE = 3


def answer(connection: Connection) -> None:
    connection.send((connection.recv(), "torch" in sys.modules))
    sys.exit(CODE)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_it_has_torch_its_parents_descriptors_and_its_own_exit_code(method: str) -> None:
    context = get_context(method)
    ours, theirs = context.Pipe()
    process = context.Process(target=answer, args=(theirs,))
    process.start()
    theirs.close()
    ours.send("said")
    assert ours.recv() == ("said", True)
    process.join()
    assert process.exitcode == CODE
    with pytest.raises(EOFError):
        ours.recv()
    ours.close()
