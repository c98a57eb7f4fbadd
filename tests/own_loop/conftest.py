"""The worlds that the programs of this folder run on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.own_loop.worlds import Worlds
from tutti.own_loop import distribute


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    made = Worlds()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As many as the ranks have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def forget_the_loop() -> Iterator[None]:
    """Leave no loop of virtual ranks, which are gone, to the tests of other modules."""
    yield
    distribute._loop = None
