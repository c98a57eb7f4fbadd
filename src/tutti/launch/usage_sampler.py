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
from tutti.errors import no_process
from tutti.launch.cores import parse_cpu_list
from tutti.launch.exit_reports import killed_by
from tutti.launch.launcher import Launcher, started_by
from tutti.launch.orphans import command_of, die_with_parent
from tutti.records.json_lines import to_json
from tutti.records.usage import GONE, RankUsage, UsageRecord
from tutti.terminal import warn_on_stderr

if TYPE_CHECKING:
    import psutil

    from tutti.comm.base import Communicator

EVERY_S: Final = 0.5
"""Seconds between two samples."""

MEMORY_EVERY_S: Final = 2.0
"""Seconds between two looks at the ranks' memory, which take longer the more memory they have."""

MEMORY_SHARE: Final = 0.004
"""The share of a core that these looks may take: where they take long, there are fewer of them."""

_PATIENCE_S: Final = 5.0


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
        """Have a last sample taken; returns when the process has ended. Warns if it was killed before."""
        try:
            self._process.communicate(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.abandon()
        if self._process.returncode < 0:
            warn_on_stderr(
                f"the process that samples cores and memory was {killed_by(-self._process.returncode)}"
            )

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
        It, on the first rank of each host, if it could be started; None elsewhere. It has ended when the
        block is left, and all ranks are there until then.
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
    cores = sorted({core for _, _, allowed in here for core in allowed} | _cores_of_launcher())
    sampler = _started({rank: process for rank, process, _ in here}, cores)
    try:
        yield sampler
    except BaseException:
        if sampler is not None:
            sampler.abandon()
        raise
    if sampler is not None:
        sampler.end()
    comm.node.barrier()


def _started(ranks: dict[int, int], cores: Sequence[int]) -> Sampler | None:
    """A new sampler; None, and a warning, where no more processes may be started: a run needs none."""
    try:
        return Sampler(ranks, cores)
    except OSError as error:
        warn_on_stderr(f"cores and memory are not sampled: {no_process(error)}")
        return None


def _cores_of_launcher() -> set[int]:
    """Return the cores of the process that started this rank, which may be bound to one of them."""
    # Slurm's daemon is no part of the job, and may use cores that the job may not.
    if started_by().launcher not in (Launcher.TUTTI, Launcher.MPIRUN):
        return set()
    try:
        return os.sched_getaffinity(os.getppid())
    except OSError:
        return set()


class Probe:
    """Takes the samples of one host.

    Args:
        ranks: the process of each rank, by rank.
        cores: the logical CPUs.
    """

    def __init__(self, ranks: dict[int, int], cores: Sequence[int]) -> None:
        import psutil

        self._host, self._places = socket.gethostname(), _places(cores)
        self._ranks: dict[int, psutil.Process] = {}
        self._pss: dict[int, int | None] = {}
        self._look_again = 0.0
        for rank, process in ranks.items():
            with suppress(psutil.NoSuchProcess):
                self._ranks[rank] = psutil.Process(process)
        self._all = list(ranks)

    def begin(self) -> None:
        """Have the first sample count from now on."""
        import psutil

        for process in self._ranks.values():
            with suppress(psutil.NoSuchProcess):
                process.cpu_percent()
        psutil.cpu_percent(percpu=True)

    def sample(self, final: bool = False) -> UsageRecord:
        """Take a sample; times are since the sample before, or since `begin`.

        Args:
            final: whether to look at the memory even if that was done a moment ago.
        """
        import psutil

        busy = psutil.cpu_percent(percpu=True)
        if final or time.monotonic() >= self._look_again:
            self._look_at_memory()
        cores = [busy[place] for place in self._places if place < len(busy)]
        return UsageRecord(time.time(), self._host, cores, [self._usage(rank) for rank in self._all])

    def _usage(self, rank: int) -> RankUsage:
        import psutil

        process, pss = self._ranks.get(rank), self._pss.get(rank)
        try:
            if process is None:
                return RankUsage(rank, pss, 0.0, GONE)
            with process.oneshot():
                state, cpu = process.status(), process.cpu_percent()
            return RankUsage(rank, pss, cpu, GONE if state == psutil.STATUS_ZOMBIE else str(state))
        except psutil.NoSuchProcess:
            return RankUsage(rank, pss, 0.0, GONE)

    def _look_at_memory(self) -> None:
        import psutil

        began = time.process_time()
        for rank, process in self._ranks.items():
            try:
                # Nothing: it has begun to end, and given its memory back; it is there for a moment still.
                self._pss[rank] = process.memory_full_info().pss or self._pss.get(rank)
            except psutil.AccessDenied:
                self._pss[rank] = None
            except psutil.NoSuchProcess:
                continue
        # Time of this process, not of the clock: on a busy machine it waits for a core most of the time.
        spent = time.process_time() - began
        self._look_again = time.monotonic() + max(MEMORY_EVERY_S, spent / MEMORY_SHARE)


def _places(cores: Sequence[int]) -> list[int]:
    """Return the place of each of `cores` in the kernel's list of CPUs, which lacks offline ones."""
    try:
        online = parse_cpu_list(Path("/sys/devices/system/cpu/online").read_text())
    except (OSError, ValueError):
        return list(cores)
    return [online.index(core) for core in cores if core in online]


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
        _append_samples(probe, path)
    except OSError as error:
        warn_on_stderr(f"cannot write {path}: {error.strerror}; cores and memory are no longer sampled")


def _append_samples(probe: Probe, path: str) -> None:
    """Append a sample every now and then, and one when the standard input ends."""
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    over = False
    probe.begin()
    while not over:
        over = bool(select.select([sys.stdin], [], [], EVERY_S)[0])
        os.write(file, to_json(probe.sample(final=over)).encode() + b"\n")
