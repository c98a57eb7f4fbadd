"""Starts the ranks of one machine, watches over them, and leaves none behind. Imports no torch.

A rank ends in one of three ways: it reports that it is done, it reports an exception, or it dies without a
word (seen at once through its pidfd). The first failure ends all other ranks and is what the caller gets.

    supervisor ──pidfd, pipe of reports──► rank 0 ┐
               ──pidfd, pipe of reports──► rank 1 ├─ one anonymous file: the arena
               ──pidfd, pipe of reports──► rank 2 ┘
"""

from __future__ import annotations

import os
import pickle
import selectors
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tutti.comm.arena import Arena
from tutti.comm.control import control_bytes
from tutti.errors import TuttiError
from tutti.launch.plan import Plan
from tutti.launch.rank import BOOT, START, Start
from tutti.launch.reports import Death, Report, cause
from tutti.launch.signals import SignalWatch, act_on, held_back
from tutti.launch.sweep import JOB, Guard, wait_for_exit

CAUSE_S: Final = 1.0
"""How long a rank that lost a peer waits for the news of what happened to that peer."""

FINISH_S: Final = 10.0
"""How long a rank that is done may take to exit."""

GRACE_S: Final = 1.0
"""How long a rank may take to exit on SIGTERM, before SIGKILL."""


@dataclass
class RankProcess:
    """A rank as the supervisor sees it."""

    rank: int
    process: subprocess.Popen[bytes]
    pidfd: int
    pipe: int
    received: bytearray = field(default_factory=bytearray)
    report: Report | None = None
    death: Death | None = None

    @property
    def alive(self) -> bool:
        """Whether the process has not been seen to end."""
        return self.process.returncode is None


def supervise(entry: str, payload: bytes, plan: Plan) -> object:
    """Run `entry` on the ranks of the plan, on this machine.

    Args:
        entry: the function that each rank calls as function(comm, payload), as "package.module:function".
        payload: handed to each rank.
        plan: how many ranks, and their threads and cores.

    Returns:
        What the function returned on rank 0.

    Raises:
        UserError: a rank found that the input is wrong.
        RankFailed: a rank raised another exception.
        PeerLost: a rank was killed, or exited before it was done.
        KeyboardInterrupt: Ctrl-C, after all ranks are gone.
        SystemExit: SIGTERM or SIGHUP, after all ranks are gone.
    """
    job = uuid.uuid4().hex
    ranks: list[RankProcess] = []
    with SignalWatch() as signals:
        guard = Guard(job, GRACE_S)
        try:
            _start_ranks(ranks, job, entry, payload, plan)
            error = _watch(ranks, signals)
        finally:
            _end(ranks, guard)
        received = signals.received
    if received is not None:
        act_on(received)
    if error is not None:
        raise error
    report = ranks[0].report
    return pickle.loads(report.value) if report is not None and report.value is not None else None


def _start_ranks(ranks: list[RankProcess], job: str, entry: str, payload: bytes, plan: Plan) -> None:
    arena = Arena.create()
    block = arena.allocate(control_bytes(plan.ranks))
    content = os.memfd_create("tutti-payload", os.MFD_CLOEXEC)
    try:
        with open(content, "wb", closefd=False) as file:
            file.write(payload)
        for rank in range(plan.ranks):
            works = rank < plan.workers
            cores = plan.cores[rank] if plan.cores and works else ()
            threads = (plan.threads or 1) if works else 1
            reading, writing = os.pipe2(os.O_CLOEXEC)
            start = Start(
                rank, plan.ranks, entry, os.getpid(), arena.fd, block, content, writing, threads, cores,
                [str(folder) for folder in sys.path], sys.argv,
            )  # fmt: skip
            environment = _environment(job, threads, crowded=bool(plan.warnings))
            try:
                ranks.append(_spawn(start, environment, reading))
            finally:
                os.close(writing)
    finally:
        arena.close()
        os.close(content)


def _environment(job: str, threads: int, crowded: bool) -> dict[str, str]:
    environment = dict(os.environ)
    environment[JOB] = job
    environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = str(threads)
    if crowded:
        # Threads that spin while they wait would keep those from working that they wait for.
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return environment


def _spawn(start: Start, environment: dict[str, str], reading: int) -> RankProcess:
    # The rank lets SIGINT through once it ignores it: a Ctrl-C while it starts must not fill the screen.
    with held_back(signal.SIGINT):
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", BOOT, f"rank {start.rank} of {start.size}"],
            stdin=subprocess.DEVNULL,
            env={**environment, START: start.as_text()},
            pass_fds=(start.memory, start.payload, start.reports),
        )
    os.set_blocking(reading, False)
    return RankProcess(start.rank, process, os.pidfd_open(process.pid), reading)


def _watch(ranks: Sequence[RankProcess], signals: SignalWatch) -> TuttiError | None:
    """Wait until all ranks are done (None), one has failed (the error), or a signal has come (None)."""
    kills_before = _out_of_memory_kills()
    patience: float | None = None
    with selectors.DefaultSelector() as selector:
        selector.register(signals, selectors.EVENT_READ)
        for one in ranks:
            selector.register(one.pidfd, selectors.EVENT_READ, one)
            selector.register(one.pipe, selectors.EVENT_READ, one)
        while signals.received is None:
            for key, _ in selector.select(
                None if patience is None else max(0.0, patience - time.monotonic())
            ):
                _take_note(selector, key, kills_before)
            error, certain = cause(
                [one.report for one in ranks if one.report], [one.death for one in ranks if one.death]
            )
            if certain:
                return error
            if error is not None:
                patience = patience or time.monotonic() + CAUSE_S
                if time.monotonic() >= patience:
                    return error
            elif all(one.report for one in ranks):
                return None
    return None


def _take_note(selector: selectors.BaseSelector, key: selectors.SelectorKey, kills_before: int) -> None:
    """Read what a rank sent, or find out how it died."""
    one: RankProcess | None = key.data
    if one is None:
        return
    open_pipe = _receive(one)
    if key.fd == one.pipe and not open_pipe:
        selector.unregister(one.pipe)
    elif key.fd == one.pidfd:
        returncode = one.process.wait()
        selector.unregister(one.pidfd)
        if one.report is None:
            # What it wrote before it died may have come between the reading above and its end.
            _receive(one)
        if one.report is None:
            starved = returncode == -signal.SIGKILL and _out_of_memory_kills() > kills_before
            one.death = Death(one.rank, time.monotonic(), returncode, starved)


def _receive(one: RankProcess) -> bool:
    """Read all that is in the rank's pipe; whether more may come."""
    while True:
        try:
            data = os.read(one.pipe, 1 << 20)
        except BlockingIOError:
            return True
        if not data:
            return False
        one.received += data
        if one.report is None:
            one.report = Report.decode(one.received)


def _out_of_memory_kills() -> int:
    """How many processes the kernel has killed for lack of memory since it started."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)


def _end(ranks: Sequence[RankProcess], guard: Guard) -> None:
    """Leave no rank behind, nor anything that a rank has started."""
    try:
        if ranks and all(one.report and not one.report.failed for one in ranks):
            wait_for_exit([one.process for one in ranks], FINISH_S)
        for signum, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, FINISH_S)):
            alive = [one.process for one in ranks if one.process.poll() is None]
            for process in alive:
                process.send_signal(signum)
            wait_for_exit(alive, patience)
    finally:
        guard.dismiss()
        for one in ranks:
            os.close(one.pidfd)
            os.close(one.pipe)
