"""A group of torch's own backend with the ranks of a test's group: what the tests compare with."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import distributed
from torch.distributed import ProcessGroup


@contextmanager
def gloo() -> Iterator[ProcessGroup]:
    """A group of all ranks, over loopback (collective)."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    group = distributed.new_group(backend="gloo")
    try:
        yield group
    finally:
        distributed.destroy_process_group(group)


def with_both(work: Callable) -> Callable:
    """Have `work(group, rank)` called with the ranks' group, then with Gloo's, and both results returned."""

    def call(rank: int) -> tuple:
        ours = work(distributed.group.WORLD, rank)
        with gloo() as theirs:
            return ours, work(theirs, rank)

    return call
