"""The ranks of a host communicator as processes."""

from __future__ import annotations

from collections.abc import Sequence

from tests.forked import ForkedRanks
from tutti.comm.shm.arena import Arena
from tutti.comm.shm.communicator import HostCommunicator
from tutti.comm.shm.layout import ControlLayout, HostGroup, control_bytes


class World(ForkedRanks):
    """Processes whose functions get a `HostCommunicator`, for `with`.

    Args:
        size: how many ranks.
        cores: how many cores the ranks are told they have; None for those that they may use. As a rule one,
            so that no wait spins: other tests run meanwhile.
        global_ranks: what the ranks are called in errors.
        absent: ranks that never come.
        join_timeout_s: how long the ranks wait for each other to come.

    Attributes:
        arena: the memory of the ranks.
        words: the control words of their communicator.
    """

    def __init__(
        self,
        size: int,
        cores: int | None = 1,
        global_ranks: Sequence[int] | None = None,
        absent: Sequence[int] = (),
        join_timeout_s: float = 60.0,
    ) -> None:
        self.size = size
        self.arena = Arena.create()
        block = self.arena.allocate(control_bytes(size))
        self.words = self.arena.words(block, ControlLayout(size).words)
        address, joined = self.arena.address, list[HostCommunicator]()

        def join(rank: int) -> HostCommunicator:
            if not joined:
                group = HostGroup(Arena.open(address), block, rank, global_ranks or range(size))
                joined.append(HostCommunicator(group, cores=cores, join_timeout_s=join_timeout_s))
            return joined[0]

        super().__init__(join, [rank for rank in range(size) if rank not in absent])

    def close(self) -> None:
        super().close()
        self.arena.close()
