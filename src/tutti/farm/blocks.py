"""The blocks of this host: groups of ranks that take one job after the other. No torch.

    this process ──► fork server ─┬─► ranks of block 0 ┐
         ▲                        └─► ranks of block 1 ┤
         └── connection to rank 0 of each block, reports, ends

The server imports torch once. When a job fails, or a rank dies, the block's ranks and their children are
killed, and others are forked; the other blocks do not notice. Ranks that have run a user's code are replaced
before the next job, as that code may have changed anything in them. Jobs of built-in parts share their ranks:
a short job then takes a sixth of the processor time that fresh ranks need.
"""

from __future__ import annotations

import os
import pickle
import selectors
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from math import inf
from multiprocessing.connection import Connection, Pipe
from typing import Final, cast

from tutti.comm.shm.arena import Arena
from tutti.comm.shm.memfd import FileAddress
from tutti.errors import DiskFull, PeerLost, TuttiError, in_one_line
from tutti.farm.block_placement import all_serve, settings_of
from tutti.farm.coordinator import (
    BlockFailed,
    BlockReady,
    EpochOver,
    JobOver,
    PoolEvent,
    StopAsked,
    TrainTask,
)
from tutti.farm.jobs import FarmJob
from tutti.launch.exit_reports import first_failure
from tutti.launch.fork_server_client import ForkServer, RankGroup
from tutti.launch.placement import Placement
from tutti.launch.rank_main import RankSetting
from tutti.launch.rank_processes import note_server_message, start_ranks
from tutti.launch.stop_request import StopPage, StopRequests
from tutti.records.farm_folder import FarmFolder
from tutti.records.run_folder import CONFIG, LOG, RunFolder
from tutti.run.resume import Resume
from tutti.run.train_job import TrainJob

ASKED: Final = "it was asked to"
"""Why a farm stops on a signal."""

TRIES: Final = 3
"""Limit on the failures of a block in a row before its ranks have met."""

ENTRY: Final = "tutti.farm.block_main:work"

Callback = Callable[[], list[PoolEvent]]


class EndedBySignal(Exception):
    """A signal ends everything at once."""


class Block:
    """The ranks of one block, as seen by the coordinator's process; `data` is the arena of data sets."""

    def __init__(self, server: ForkServer, data: FileAddress, settings: Sequence[RankSetting]) -> None:
        self.ready = False  # its ranks have met
        self.spent = False  # they have run a user's code
        self._stack = ExitStack()
        stop = StopPage.make_file()
        self.page = StopPage(stop)
        self.channel, theirs = Pipe()
        self._stack.callback(self.channel.close)
        self.forker = server.group()
        self._stack.callback(self.forker.close)
        try:
            all_of = [settings[0]._replace(channel=theirs.fileno()), *settings[1:]]
            self.ranks = start_ranks(self._stack, self.forker, ENTRY, pickle.dumps(data), all_of, stop)
        finally:
            theirs.close()
            os.close(stop)

    def tell(self, what: object) -> None:
        """Send an object to rank 0, whose end is noticed elsewhere."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.channel.send(what)

    def sources(self) -> list[tuple[object, Callable[[], bool]]]:
        """Return the readable sources, each with its reader, which returns whether more may come."""
        readers = [(one.pipe, one.receive) for one in self.ranks]
        return [(self.forker.control, self._hear_server), *readers]

    def _hear_server(self) -> bool:
        if not note_server_message(self.ranks, self.forker):
            raise _lost_server(self.forker)
        return not all(one.ended for one in self.ranks)

    def failure(self) -> TuttiError | None:
        """Return why its ranks cannot go on; None: they can, or the cause is still unknown."""
        reports = [one.report for one in self.ranks if one.report]
        deaths = [one.death for one in self.ranks if one.death]
        if not (reports or deaths):
            return None
        error, certain = first_failure(reports, deaths)
        if error is None:
            return TuttiError("its ranks have left") if len(reports) == len(self.ranks) else None
        # Why a peer was lost is known once that one's end is.
        return error if certain or all(one.ended for one in self.ranks) else None

    def end(self) -> None:
        """Kill its ranks and their children."""
        self._stack.close()


class HostPool:
    """The blocks of this host."""

    def __init__(
        self,
        server: ForkServer,
        folder: FarmFolder,
        placement: Placement,  # of all ranks, block after block
        blocks: int,
        stopping: StopRequests,
    ) -> None:
        self.blocks = blocks
        self._server, self._folder, self._stopping = server, folder, stopping
        self._size, self._threads = placement.ranks // blocks, placement.threads or 1
        self._settings = settings_of(placement, blocks, sorted(os.sched_getaffinity(0)))
        self._arena = Arena.create()
        self._selector = selectors.DefaultSelector()
        self._watch(stopping, self._signal)
        self._watch(server.control, self._hear_server)
        self._told = False
        self._pending: list[PoolEvent] = []
        self._tries = [0] * blocks
        self._blocks: dict[int, Block] = {}
        for number in range(blocks):
            self._start(number)

    # --- what the coordinator asks for

    def now(self) -> float:
        """Return the time in seconds, by the monotonic clock."""
        return time.monotonic()

    def begin(self, block: int, job: FarmJob) -> None:
        """Start a job on a free block."""
        workers = self._size - job.config.servers
        if workers < 1:
            why = f"BadOption: {all_serve(self._size, job.config.servers)}"
            self._pending.append(BlockFailed(block, why, why))
            return
        if self._blocks[block].spent:
            self.restart(block)
        ranks = self._blocks[block]
        folder = self._folder.job(job.name)
        run = RunFolder(folder)
        self._folder.clear_error(job.name)
        resume = Resume(folder, auto=True) if run.has(CONFIG) else None
        folder.mkdir(parents=True, exist_ok=True)
        config = replace(job.config, out=str(folder), workers=str(workers), threads=self._threads)
        task = TrainJob(config, objects=job.objects, resume=resume)
        ranks.tell(TrainTask(block, task, folder.absolute() / LOG, job.prunable))
        if job.runs_code:
            ranks.spent = True

    def wait(self, until: float) -> list[PoolEvent]:
        """Wait for events until the time `until`, which may be infinite, and return them."""
        events, self._pending = self._pending, []
        while not events:
            events = self._next_events(until)
            if self.now() >= until:
                break
        return events

    def gather(self) -> None:
        """Wait until the ranks of all blocks have met: no job has to wait for torch."""
        while not all(block.ready for block in self._blocks.values()):
            self._pending += self._next_events(inf)

    def answer(self, block: int, ends: bool) -> None:
        """Inform the block of a prunable job whether the job ends with the finished epoch."""
        self._blocks[block].tell(ends)

    def ask_to_stop(self) -> None:
        """Ask all blocks to save and stop."""
        for block in self._blocks.values():
            block.page.request()

    def restart(self, block: int) -> JobOver | None:
        """Kill a block's ranks and start others; return its job's end if that has just come."""
        ended = self._drop(block)
        self._start(block)
        return ended

    def close(self) -> None:
        """End all blocks."""
        for block in self._blocks.values():
            block.end()
        self._selector.close()
        self._arena.close()

    # --- what happens

    def _watch(self, source: object, callback: Callback) -> None:
        self._selector.register(source, selectors.EVENT_READ, callback)  # type: ignore[arg-type]

    def _unwatch(self, source: object) -> None:
        with suppress(KeyError):
            self._selector.unregister(source)  # type: ignore[arg-type]

    def _next_events(self, until: float) -> list[PoolEvent]:
        """Wait for something, and return the resulting events."""
        events: list[PoolEvent] = []
        for key, _ in self._selector.select(None if until == inf else max(0.0, until - self.now())):
            events += cast("Callback", key.data)()
        # Only now: what has been read decides why a block has failed.
        for number in self._blocks:
            events += self._failure(number)
        return events

    def _signal(self) -> list[PoolEvent]:
        if self._stopping.over():
            raise EndedBySignal
        told, self._told = self._told, self._stopping.page.requested
        return [StopAsked(ASKED)] if self._told and not told else []

    def _read(self, source: object, read: Callable[[], bool]) -> list[PoolEvent]:
        """Read from a rank or the server, and return the resulting events."""
        if not read():
            self._unwatch(source)
        return []

    def _hear(self, number: int) -> list[PoolEvent]:
        block, events = self._blocks[number], list[PoolEvent]()
        for message in self._received(block.channel):
            if isinstance(message, BlockReady):
                block.ready, self._tries[number] = True, 0
            else:
                events.append(cast("EpochOver | JobOver", message))
        return events

    def _received(self, channel: Connection) -> list[object]:
        """Return the messages from rank 0 of a block so far, without waiting."""
        messages: list[object] = []
        try:
            while channel.poll():
                messages.append(channel.recv())
        except (EOFError, OSError):
            self._unwatch(channel)
        return messages

    def _hear_server(self) -> list[PoolEvent]:
        if self._server.next_message() is None:
            raise _lost_server(self._server)
        return []

    def _failure(self, number: int) -> list[PoolEvent]:
        block = self._blocks[number]
        error = block.failure()
        if error is None:
            return []
        if isinstance(error, DiskFull):
            # All other jobs would fail, too.
            raise error
        # It may have done its job before it died.
        events = self._hear(number)
        self._tries[number] += not block.ready
        if self._tries[number] >= TRIES:
            raise TuttiError(f"the ranks of block {number} cannot start: {error}")
        self.restart(number)
        return [
            *events,
            BlockFailed(number, in_one_line(str(error)), str(error), isinstance(error, PeerLost)),
        ]

    def _start(self, number: int) -> None:
        block = self._blocks[number] = Block(self._server, self._arena.address, self._settings[number])
        self._watch(block.channel, partial(self._hear, number))
        for source, read in block.sources():
            self._watch(source, partial(self._read, source, read))

    def _drop(self, number: int) -> JobOver | None:
        block = self._blocks[number]
        over = [one for one in self._hear(number) if isinstance(one, JobOver)]
        for source in (block.channel, *(source for source, _ in block.sources())):
            self._unwatch(source)
        block.end()
        return over[0] if over else None


def _lost_server(server: RankGroup) -> TuttiError:
    """Return the error for a lost fork server. Its ranks die with it: no job is to blame."""
    return TuttiError(
        f"the process that ranks are forked from was killed (exit code {server.returncode()}), perhaps for "
        "lack of memory; unfinished jobs can be continued with --resume"
    )
