"""The ranks of a process group of torch as processes."""

from __future__ import annotations

from datetime import timedelta

from torch import distributed
from torch.distributed import TCPStore

from tests.forked import ForkedRanks


class Ranks(ForkedRanks):
    """Processes that are ranks of a job, or without a `backend` can become some; functions get their rank."""

    def __init__(self, size: int, backend: str | None = "tutti", timeout_s: float = 60.0) -> None:
        self.size = size
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = self.store.port

        def join(rank: int) -> int:
            if backend is not None and not distributed.is_initialized():
                store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
                timeout = timedelta(seconds=timeout_s)
                distributed.init_process_group(
                    backend, store=store, rank=rank, world_size=size, timeout=timeout
                )
            return rank

        super().__init__(join, range(size))
