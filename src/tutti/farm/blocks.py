"""The blocks of this host: groups of ranks that take one job after the other. No torch.

    this process ──► fork server ─┬─► branch ──► ranks of block 0 ┐
         ▲                        └─► branch ──► ranks of block 1 ┤
         └── channel to rank 0 of each block, exit reports, ends ─┘

The server imports torch once. A block whose job fails, or one of whose ranks dies, is dropped with all that
it has started, and another is forked in its place; the others notice nothing of it. So is a block that has
another job after one with code of the user's: that may have changed anything in its processes. Its
successor is forked while it works, so that the next job need not wait for it.
"""

from __future__ import annotations

import os
import pickle
import selectors
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, cast

from tutti.comm.shm.arena import Arena
from tutti.errors import DiskFull, PeerLost, TuttiError, in_one_line
from tutti.farm.block_placement import all_serve, settings_of
from tutti.farm.coordinator import (
    BlockFailed,
    EpochOver,
    JobOver,
    PoolEvent,
    StopAsked,
)
from tutti.farm.jobs import FarmJob
from tutti.farm.messages import (
    INDEX_BYTES,
    BlockReady,
    EpochAnswer,
    EpochNote,
    SharedPlace,
    TaskDone,
    TrainTask,
)
from tutti.launch.control_channel import Channel
from tutti.launch.crew import CAUSE_S
from tutti.launch.exit_reports import cause
from tutti.launch.fork_server_client import ForkServer
from tutti.launch.placement import Placement
from tutti.launch.rank_processes import (
    RankSetting,
    note_server_message,
    out_of_memory_kills,
    start_ranks,
)
from tutti.launch.stop_request import StopPage, Stopping
from tutti.records.farm_folder import FarmFolder
from tutti.records.launches import Launch
from tutti.records.run_folder import CONFIG, LOG, RunFolder
from tutti.run.resume import Resume
from tutti.run.train_job import TrainJob

ASKED: Final = "it was asked to"
"""Why a farm stops on a signal."""

TRIES: Final = 3
"""Limit on the failures of a block in a row before its ranks have come together."""

SERVER: Final = -1
"""The number by which the fork server is told from blocks."""

ENTRY: Final = "tutti.farm.block_main:work"


class EndedBySignal(Exception):
    """A signal ends everything at once."""


class Block:
    """One block, as the process of the coordinator sees it.

    Args:
        server: forks its ranks.
        data: where those of the host are.
        settings: of each rank.
    """

    def __init__(self, server: ForkServer, data: SharedPlace, settings: Sequence[RankSetting]) -> None:
        self.ready = False
        self.patience: float | None = None
        self._kills_before = out_of_memory_kills()
        self._stack = ExitStack()
        stop = StopPage.make_file()
        self.page = StopPage(stop)
        self.channel, theirs = Channel.pair()
        self._stack.callback(self._close_channel)
        self.last_words: list[object] = []
        self.forker = server.branch(ENTRY)
        self._stack.callback(self.forker.close)
        try:
            all_of = [settings[0]._replace(channel=theirs.fileno()), *settings[1:]]
            self.ranks = start_ranks(self._stack, self.forker, ENTRY, pickle.dumps(data), all_of, stop)
        finally:
            theirs.close()
            os.close(stop)

    def sources(self) -> list[tuple[object, Callable[[], bool]]]:
        """Return what is to be read when it is readable, and how; which tells whether more may come."""
        readers = [(one.pipe, one.receive) for one in self.ranks]
        return [
            (self.forker.control, self._hear_server),
            *cast("list[tuple[object, Callable[[], bool]]]", readers),
        ]

    def _hear_server(self) -> bool:
        note_server_message(self.ranks, self.forker, self._kills_before)
        return not all(one.ended for one in self.ranks)

    def failure(self) -> TuttiError | None:
        """Return why its ranks cannot go on; None: they can, or it is not certain yet."""
        reports = [one.report for one in self.ranks if one.report]
        deaths = [one.death for one in self.ranks if one.death]
        if not (reports or deaths):
            return None
        error, certain = cause(reports, deaths)
        if error is None:
            return TuttiError("its ranks have left") if len(reports) == len(self.ranks) else None
        # What a rank lost a peer by is known a little later.
        self.patience = self.patience or time.monotonic() + CAUSE_S
        over = time.monotonic() >= self.patience or all(one.ended for one in self.ranks)
        return error if certain or over else None

    def _close_channel(self) -> None:
        # Nobody writes into it any more.
        self.last_words += self.channel.received() or []
        self.channel.close()

    def close(self) -> None:
        """End its ranks, and all that they have started, at once."""
        self.page.end()
        self._stack.close()


@dataclass(frozen=True)
class _Reader:
    """Callback for the time when something is readable."""

    block: int
    read: Callable[[], bool]


def _answer(channel: Channel, ends: bool) -> None:
    channel.send(EpochAnswer(ends))


class HostPool:
    """The blocks of this host.

    Args:
        server: forks their ranks.
        folder: of the farm.
        launch: which has claimed the jobs.
        placement: of all ranks, block after block.
        blocks: how many there are.
        stopping: says what signals mean.
    """

    def __init__(
        self,
        server: ForkServer,
        folder: FarmFolder,
        launch: Launch,
        placement: Placement,
        blocks: int,
        stopping: Stopping,
    ) -> None:
        self.blocks = blocks
        self._server, self._folder, self._stopping = server, folder, stopping
        self._launch = launch
        self._size, self._threads = placement.ranks // blocks, placement.threads or 1
        self._settings = settings_of(placement, blocks, sorted(os.sched_getaffinity(0)))
        self._arena = Arena.create()
        self._data = SharedPlace(self._arena.address, self._arena.allocate(INDEX_BYTES))
        self._selector = selectors.DefaultSelector()
        self._selector.register(stopping, selectors.EVENT_READ)
        self._selector.register(server.control, selectors.EVENT_READ, _Reader(SERVER, self._hear_server))
        self._told = False
        self._pending: list[PoolEvent] = []
        self._tries = [0] * blocks
        # Those whose ranks have run code of the user's, which may have changed whatever it liked in them.
        self._used = set[int]()
        self._blocks: dict[int, Block] = {}
        self._successors: dict[int, Block] = {}
        for number in range(blocks):
            self._start(number)

    # --- what the coordinator asks for

    def now(self) -> float:
        """Return the time in seconds, by the monotonic clock."""
        return time.monotonic()

    def begin(self, block: int, job: FarmJob) -> None:
        """Have a block work on a job."""
        workers = self._size - job.config.servers
        if workers < 1:
            why = f"BadOption: {all_serve(self._size, job.config.servers)}"
            self._pending.append(BlockFailed(block, why, why))
            return
        if block in self._used:
            self.restart(block)
        if job.runs_code:
            self._used.add(block)
        folder = self._folder.job(job.name)
        run = RunFolder(folder)
        self._folder.clear_error(job.name)
        resume = Resume(folder, auto=True) if run.has(CONFIG) else None
        folder.mkdir(parents=True, exist_ok=True)
        config = replace(job.config, out=str(folder), workers=str(workers), threads=self._threads)
        task = TrainJob(config, objects=job.objects, resume=resume, floats=job.floats)
        successor = self._launch.successor(job.name).absolute()
        self._blocks[block].channel.send(TrainTask(task, folder.absolute() / LOG, job.prunable, successor))
        if block in self._used:
            self._successors[block] = self._fork(block)

    def wait(self, until: float | None) -> list[PoolEvent]:
        """Return what has happened, once something has or it is `until`.

        Raises:
            EndedBySignal: all is to end at once.
            DiskFull: the job of a block cannot write its folder.
            TuttiError: a block does not come to work, or there is nothing to start one from.
        """
        events, self._pending = self._pending, []
        while not events:
            events = self._next_events(until)
            if until is not None and self.now() >= until:
                break
        return events

    def gather(self) -> None:
        """Wait until the ranks of all blocks have come together: no job has to wait for torch.

        Raises:
            EndedBySignal, TuttiError: as `wait`.
        """
        while not all(block.ready for block in self._blocks.values()):
            self._pending += self._next_events(None)

    def ask_to_stop(self) -> None:
        """Ask all blocks to save and stop."""
        for block in self._blocks.values():
            block.page.request()

    def can_stop(self, block: int) -> bool:
        """Tell whether the job of a block is where it can be stopped."""
        return self._blocks[block].page.stoppable

    def restart(self, block: int) -> JobOver | None:
        """End a block's ranks at once, whatever they do, and start others; return how its job has ended."""
        ended = self._drop(block)
        self._start(block)
        return ended

    def close(self) -> None:
        """End all blocks."""
        for number in list(self._blocks):
            self._drop(number)
        for successor in self._successors.values():
            successor.close()
        self._selector.close()
        self._arena.close()

    # --- what happens

    def _next_events(self, until: float | None) -> list[PoolEvent]:
        """Wait for something, and return what it means, if it means anything."""
        limits = [block.patience for block in self._blocks.values() if block.patience is not None]
        limit = min(limits if until is None else [*limits, until], default=None)
        ready = self._selector.select(None if limit is None else max(0.0, limit - self.now()))
        events: list[PoolEvent] = []
        heard = {number for number, block in self._blocks.items() if block.patience is not None}
        for key, _ in ready:
            reader = cast("_Reader | None", key.data)
            if reader is None:
                events += self._signal()
            elif reader.block != SERVER and key.fileobj is self._blocks[reader.block].channel:
                events += self._hear(reader.block)
            else:
                heard |= {reader.block} - {SERVER}
                if not reader.read():
                    self._selector.unregister(key.fileobj)
        for number in heard:
            events += self._failure(number)
        return events

    def _signal(self) -> list[PoolEvent]:
        if self._stopping.over():
            raise EndedBySignal
        told, self._told = self._told, self._stopping.page.requested
        return [StopAsked(ASKED)] if self._told and not told else []

    def _hear(self, number: int) -> list[PoolEvent]:
        block, events = self._blocks[number], list[PoolEvent]()
        messages = block.channel.received()
        if messages is None:
            self._selector.unregister(block.channel)
            return []
        for message in messages:
            if isinstance(message, BlockReady):
                block.ready, self._tries[number] = True, 0
            elif isinstance(message, EpochNote):
                answer = partial(_answer, block.channel) if message.asks else None
                events.append(EpochOver(number, message.record, answer))
            elif isinstance(message, TaskDone):
                events.append(JobOver(number, message.summary, message.stopped or ""))
        return events

    def _hear_server(self) -> bool:
        if self._server.next_message() is None:
            # Its ranks die with it: no job is to blame.
            raise TuttiError(
                f"the process that ranks are forked from was killed (exit code {self._server.returncode()}), "
                "perhaps for lack of memory; what was being trained has not failed, and goes on with --resume"
            )
        return True

    def _failure(self, number: int) -> list[PoolEvent]:
        block = self._blocks[number]
        error = block.failure()
        if error is None:
            return []
        if isinstance(error, DiskFull):
            # So would all other jobs fail.
            raise error
        # It may have done its job before it died.
        events = self._hear(number) if block.channel in self._selector.get_map() else []
        self._tries[number] += not block.ready
        if self._tries[number] >= TRIES:
            raise TuttiError(f"block {number} does not come to work: {error}")
        over = self.restart(number)
        events += [over] if over is not None else []
        return [
            *events,
            BlockFailed(number, in_one_line(str(error)), str(error), isinstance(error, PeerLost)),
        ]

    def _start(self, number: int) -> None:
        self._used.discard(number)
        block = self._successors.pop(number, None) or self._fork(number)
        self._blocks[number] = block
        for source, read in block.sources():
            self._selector.register(source, selectors.EVENT_READ, _Reader(number, read))  # type: ignore[arg-type]
        self._selector.register(block.channel, selectors.EVENT_READ, _Reader(number, lambda: True))

    def _fork(self, number: int) -> Block:
        return Block(self._server, self._data, self._settings[number])

    def _drop(self, number: int) -> JobOver | None:
        block = self._blocks.pop(number)
        for source in (*(source for source, _ in block.sources()), block.channel):
            if source in self._selector.get_map():
                self._selector.unregister(source)  # type: ignore[arg-type]
        block.close()
        over = [one for one in block.last_words if isinstance(one, TaskDone)]
        return JobOver(number, over[0].summary, over[0].stopped or "") if over else None
