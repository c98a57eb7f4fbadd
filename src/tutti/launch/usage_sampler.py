"""The sampler of a run's cores and memory: a thread in the first rank of each host."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from tutti.launch.cores import parse_cpu_list
from tutti.records.json_lines import to_json
from tutti.records.usage import GONE, RankUsage, UsageRecord
from tutti.terminal import warn_on_stderr

if TYPE_CHECKING:
    from tutti.comm.base import Communicator

EVERY_S: Final = 0.5
"""Seconds between two samples."""

MEMORY_EVERY_S: Final = 2.0
"""Seconds between two looks at the ranks' memory, which take longer the more memory they have."""

MEMORY_SHARE: Final = 0.004
"""The share of a core that these looks may take; long ones come less often."""


class Sampler:
    """Takes the samples of one host."""

    def __init__(self, ranks: dict[int, int], cores: Sequence[int]) -> None:
        self._cores, self._ranks = cores, ranks
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, path: Path) -> None:
        """Append samples to the file `path` until `end`."""
        self._thread = threading.Thread(target=self._run, args=(path,), name="tutti-usage", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Take a last sample."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self, path: Path) -> None:
        # This thread alone: the rank may be bound to a core, which it needs for itself.
        os.sched_setaffinity(0, self._cores)
        try:
            with path.open("a") as file:
                probe = Probe(self._ranks, self._cores)
                probe.sample()  # The first one counts from here on.
                over = False
                while not over:
                    over = self._over.wait(EVERY_S)
                    file.write(to_json(probe.sample(final=over)) + "\n")
                    file.flush()
        except OSError as error:
            warn_on_stderr(f"cannot write {path}: {error.strerror}; cores and memory are no longer sampled")


@contextmanager
def sampling(comm: Communicator, wanted: bool) -> Iterator[Sampler | None]:
    """Yield a sampler of this host's ranks, on its first rank; None elsewhere (collective)."""
    if not wanted:
        yield None
        return
    mine = comm.rank, os.getpid(), sorted(os.sched_getaffinity(0))
    here = cast("list[tuple[int, int, list[int]]]", comm.node.all_gather_objects(mine))
    if comm.node.rank != 0:
        yield None
        comm.node.barrier()  # The last sample is of ranks that are there.
        return
    cores = {core for _, _, allowed in here for core in allowed}
    sampler = Sampler({rank: process for rank, process, _ in here}, sorted(cores))
    try:
        yield sampler
    finally:
        sampler.end()
    comm.node.barrier()


class Probe:
    """Looks at the processes of one host."""

    def __init__(self, ranks: dict[int, int], cores: Sequence[int]) -> None:
        import psutil

        # psutil lists the CPUs that are online.
        online = parse_cpu_list(Path("/sys/devices/system/cpu/online").read_text())
        self._host, self._places = socket.gethostname(), [online.index(core) for core in cores]
        self._ranks = {rank: psutil.Process(process) for rank, process in ranks.items()}
        self._pss: dict[int, int | None] = {}
        self._look_again = 0.0

    def sample(self, final: bool = False) -> UsageRecord:
        """Take a sample; times are since the previous sample."""
        import psutil

        busy = psutil.cpu_percent(percpu=True)
        if final or time.monotonic() >= self._look_again:
            self._look_at_memory()
        cores = [busy[place] for place in self._places]
        return UsageRecord(time.time(), self._host, cores, [self._usage(rank) for rank in self._ranks])

    def _usage(self, rank: int) -> RankUsage:
        import psutil

        process, pss = self._ranks[rank], self._pss.get(rank)
        with suppress(psutil.NoSuchProcess), process.oneshot():
            state = process.status()
            if state != psutil.STATUS_ZOMBIE:
                return RankUsage(rank, pss, process.cpu_percent(), str(state))
        return RankUsage(rank, pss, 0.0, GONE)

    def _look_at_memory(self) -> None:
        import psutil

        began = time.thread_time()
        for rank, process in self._ranks.items():
            # It may be gone, or the kernel may not tell. It has no memory when it has begun to end.
            with suppress(psutil.Error):
                self._pss[rank] = process.memory_full_info().pss or self._pss.get(rank)
        # CPU time: on a busy machine the thread waits for a core most of the time.
        spent = time.thread_time() - began
        self._look_again = time.monotonic() + max(MEMORY_EVERY_S, spent / MEMORY_SHARE)
