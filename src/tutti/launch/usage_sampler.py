"""The sampler of the cores and the memory that a run uses: a small process on each host.

    first rank of the host ──pipe──► sampler      the first line is the file to append to;
                                                  its end, and the rank's death, are the sampler's

A process of its own goes on when a rank is stopped, and takes no lock of an interpreter that trains. It needs
no torch, and is started before the data is opened, so that training does not feel how it starts.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from tutti.activity import be_bystander
from tutti.launch.cores import parse_cpu_list
from tutti.launch.launcher import Launcher, started_by
from tutti.launch.orphans import command_of, die_with_parent
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
"""The share of a core that these looks may take: where they take long, there are fewer of them."""


class Sampler:
    """The process that samples, as seen from the rank that starts it. It lives no longer than the rank.

    Args:
        ranks: the process of each rank on this host, by rank.
        cores: the logical CPUs to be sampled.
    """

    def __init__(self, ranks: dict[int, int], cores: Sequence[int]) -> None:
        self._process = subprocess.Popen(
            command_of("tutti.launch.usage_sampler", parent=os.getpid(), ranks=ranks, cores=cores),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
        )

    def begin(self, path: Path) -> None:
        """Have samples appended to the file `path`; without this call none are taken."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it is gone, and has said why
            self._process.stdin.write(os.fsencode(path.absolute()) + b"\n")

    def end(self) -> None:
        """Have a last sample taken; returns when the process has ended."""
        self._process.communicate()

    def abandon(self) -> None:
        """End the process at once."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def sampling(comm: Communicator, wanted: bool) -> Iterator[Sampler | None]:
    """Have a process ready on each host that can sample its ranks (collective).

    Args:
        comm: the ranks to be sampled.
        wanted: whether to; the same on all of them.

    Yields:
        It, on the first rank of each host; None elsewhere. It has ended when the block is left, and all ranks
        are there until then.
    """
    if not wanted:
        yield None
        return
    mine = comm.rank, os.getpid(), sorted(os.sched_getaffinity(0))
    here = cast("list[tuple[int, int, list[int]]]", comm.node.all_gather_objects(mine))
    if comm.node.rank != 0:
        yield None
        comm.node.barrier()
        return
    cores = {core for _, _, allowed in here for core in allowed}
    # What started this rank may be bound to a core. (Slurm's daemon is no part of the job.)
    if started_by().launcher in (Launcher.TUTTI, Launcher.MPIRUN):
        with suppress(OSError):
            cores |= os.sched_getaffinity(os.getppid())
    sampler = Sampler({rank: process for rank, process, _ in here}, sorted(cores))
    try:
        yield sampler
    except BaseException:
        sampler.abandon()
        raise
    sampler.end()
    comm.node.barrier()


class Probe:
    """Takes the samples of one host.

    Args:
        ranks: the process of each rank, by rank.
        cores: the logical CPUs.
    """

    def __init__(self, ranks: dict[int, int], cores: Sequence[int]) -> None:
        import psutil

        # psutil lists the CPUs that are online.
        online = parse_cpu_list(Path("/sys/devices/system/cpu/online").read_text())
        self._host, self._places = socket.gethostname(), [online.index(core) for core in cores]
        self._ranks = {rank: psutil.Process(process) for rank, process in ranks.items()}
        self._pss: dict[int, int | None] = {}
        self._look_again = 0.0

    def sample(self, final: bool = False) -> UsageRecord:
        """Take a sample; times are since the sample before.

        Args:
            final: whether to look at the memory even if that was done a moment ago.
        """
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

        began = time.process_time()
        for rank, process in self._ranks.items():
            # It may be gone, or the kernel may not tell. It has no memory when it has begun to end.
            with suppress(psutil.Error):
                self._pss[rank] = process.memory_full_info().pss or self._pss.get(rank)
        # Time of this process, not of the clock: on a busy machine it waits for a core most of the time.
        spent = time.process_time() - began
        self._look_again = time.monotonic() + max(MEMORY_EVERY_S, spent / MEMORY_SHARE)


def main(parent: int, ranks: dict[str, int], cores: list[int]) -> None:
    """Be the sampler of `parent`, a rank."""
    die_with_parent(parent)
    be_bystander()
    # They may reach every process of a job; the rank that started this says when it is over.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(signum, signal.SIG_IGN)
    # That rank may be bound to a core, which it needs for itself.
    os.sched_setaffinity(0, cores)
    probe = Probe({int(rank): process for rank, process in ranks.items()}, cores)
    path = os.fsdecode(sys.stdin.buffer.readline().removesuffix(b"\n"))
    if not path:
        return
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        probe.sample()  # The first one counts from here on.
        over = False
        while not over:
            over = bool(select.select([sys.stdin], [], [], EVERY_S)[0])
            os.write(file, to_json(probe.sample(final=over)).encode() + b"\n")
    except OSError as error:
        warn_on_stderr(f"cannot write {path}: {error.strerror}; cores and memory are no longer sampled")
