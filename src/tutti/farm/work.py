"""A launch of a farm on this host: blocks of ranks work on jobs until there are none left. No torch."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from functools import partial

from tutti.errors import BadOption
from tutti.farm.block_placement import place_blocks
from tutti.farm.blocks import EndedBySignal, HostPool
from tutti.farm.claims import Unclaimed
from tutti.farm.coordinator import Coordinator, FarmOutcome, Happening, JobBegan, JobEnded, Listener
from tutti.farm.jobs import JobSource
from tutti.launch.cores import allowed_cores
from tutti.launch.fork_server_client import fork_server
from tutti.launch.placement import Placement
from tutti.launch.runtime_settings import give_back_memory
from tutti.launch.signals import SignalWatch
from tutti.launch.stop_request import StopPage, StopRequests
from tutti.launch.usage_sampler import Sampler
from tutti.records.farm_folder import BLOCK, THREADS, FarmEvent, FarmFolder, JobState
from tutti.records.launches import Launch
from tutti.records.run_folder import RunFolder
from tutti.terminal import warn_on_stderr


def work_on(
    folder: FarmFolder,
    source: JobSource,
    *,
    block: int = 1,  # the ranks of each block
    blocks: int | None = None,  # None: what the cores allow, but only those that help with `jobs`
    threads: int | None = None,  # of each rank; None: those of earlier launches, or what the cores allow
    jobs: int | None = None,  # the number that the source will give, if that is known
    servers: int = 0,  # the ranks of each block that keep a parameter centre, and need no core
    job_timeout_s: float | None = None,  # from then on a job counts as hanging, and fails; None: never
    time_limit_s: float | None = None,  # the farm saves and stops then
    listener: Listener | None = None,  # hears of every event
) -> FarmOutcome:
    """Work on the jobs of a farm with blocks of ranks on this host, until none is left.

    Jobs that finished earlier are not repeated, stopped ones continue from their newest checkpoint, and
    failed ones are retried. Other launches may work on the same farm: each job is trained by one of them.

    Raises:
        KeyboardInterrupt, SystemExit: the second Ctrl-C or SIGTERM, when all ranks are gone.
        DiskFull: there is no room for a job's files; started jobs can be resumed later.
    """
    placement, count = _settle(folder, block, blocks, threads, jobs, servers)
    for warning in placement.warnings:
        warn_on_stderr(warning)
    # This process waits from now on.
    give_back_memory()
    outcome = None
    with folder.launch() as launch, SignalWatch() as signals, ExitStack() as stack:
        # The farm itself looks for requests all the time.
        stopping = StopRequests(signals, StopPage())
        stopping.page.stoppable = True
        pool = _pool(stack, folder, launch, placement, count, stopping)
        stack.callback(pool.close)
        note = partial(_note, folder, launch, listener)
        left = Unclaimed(folder, launch, source, note)
        coordinator = Coordinator(pool, left, job_timeout_s, time_limit_s, note, left.elsewhere)
        with suppress(EndedBySignal):
            pool.gather()
            outcome = coordinator.run()
    stopping.act()
    assert outcome is not None, "a signal that ends everything raises"
    return outcome


def _pool(
    stack: ExitStack,
    folder: FarmFolder,
    launch: Launch,
    placement: Placement,
    blocks: int,
    stopping: StopRequests,
) -> HostPool:
    """Start the blocks, and sample their usage."""
    server = stack.enter_context(fork_server())
    pool = HostPool(server, folder, placement, blocks, stopping)
    # One for all jobs, which share the cores.
    sampler = Sampler({}, allowed_cores().logical)
    stack.callback(sampler.end)
    sampler.begin(launch.usage)
    return pool


def _settle(
    folder: FarmFolder, block: int, blocks: int | None, threads: int | None, jobs: int | None, servers: int
) -> tuple[Placement, int]:
    """Place blocks with the ranks and threads of earlier launches; otherwise as in `work_on`."""
    known = folder.settled(THREADS)
    if known is not None and threads not in (None, known):
        raise BadOption(
            f"--threads is {threads}, and the ranks of {folder.path} have had {known} each so far; leave it "
            "out, as with other threads results have other last bits"
        )
    placement, count = place_blocks(block, blocks, known or threads, jobs, servers)
    ranks = folder.settle(BLOCK, block)
    if ranks != block:
        raise BadOption(
            f"--block is {block}, and was {ranks} for all jobs of {folder.path} so far; give --block {ranks} "
            f"(workers={ranks} in Python), as results depend on the number of ranks"
        )
    settled = folder.settle(THREADS, placement.threads or 1)
    if settled != placement.threads:
        placement, count = place_blocks(block, blocks, settled, jobs, servers)
    return placement, count


def _note(folder: FarmFolder, launch: Launch, listener: Listener | None, what: Happening) -> None:
    """Record an event, and pass it on."""
    if isinstance(what, JobBegan):
        launch.note(FarmEvent(time.time(), "began", what.job.name, what.block, launch=launch.name))
    elif isinstance(what, JobEnded):
        outcome = what.outcome
        if outcome.state is JobState.FAILED:
            RunFolder(folder.job(what.job.name)).write_error(what.traceback or outcome.why)
        how = outcome.state.value, outcome.seconds, outcome.why
        launch.note(FarmEvent(time.time(), "ended", what.job.name, what.block, *how, launch.name))
    if listener is not None:
        listener(what)
