"""The ranks of one group, as seen by the process that requested them: their reports, and their ends."""

from __future__ import annotations

import os
import pickle
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from typing import cast

from tutti.comm.shm.arena import Arena
from tutti.comm.shm.layout import control_bytes
from tutti.launch.exit_reports import Death, Report
from tutti.launch.fork_server import RankEnded
from tutti.launch.fork_server_client import RankGroup
from tutti.launch.rank_main import Descriptors, RankJob, RankPlace, RankSetting


@dataclass
class RankProcess:
    """The supervisor's record of a rank: its report, and its end."""

    rank: int
    pipe: Connection
    report: Report | None = None
    death: Death | None = None
    ended: bool = False
    hung: str = ""

    def receive(self) -> bool:
        """Read the report if it has come; return whether it may come later."""
        try:
            if self.report is None and self.pipe.poll():
                self.report = cast("Report", self.pipe.recv())
        except (EOFError, OSError):  # It ended, perhaps in the middle of its report.
            return False
        return self.report is None

    def end(self, returncode: int) -> None:
        """Record that the process has ended."""
        self.ended = True
        # It may have sent its report after the last read and before its end: read once more.
        self.receive()
        done = self.report is not None and not self.report.failed
        if self.report is None or (done and returncode != 0):
            self.death = Death(self.rank, time.monotonic(), returncode, done, self.hung)


def start_ranks(
    stack: ExitStack,
    server: RankGroup,
    entry: str,
    payload: bytes,
    settings: Sequence[RankSetting],
    stop: int,
    arena: Arena | None = None,
) -> list[RankProcess]:
    """Fork the ranks of a group, with a new arena."""
    if arena is None:
        with closing(Arena.create()) as made:
            return start_ranks(stack, server, entry, payload, settings, stop, made)
    ranks: list[RankProcess] = []
    size = len(settings)
    block = arena.allocate(control_bytes(size))
    with open(os.memfd_create("tutti-job", os.MFD_CLOEXEC), "wb") as content:
        path = [str(folder) for folder in sys.path]
        pickle.dump(RankJob(payload, path, sys.argv, os.getcwd(), dict(os.environ)), content)
        content.flush()
        for rank, setting in enumerate(settings):
            reading, writing = Pipe(duplex=False)
            ranks.append(RankProcess(rank, stack.enter_context(reading)))
            with writing:
                files = arena.fd, content.fileno(), writing.fileno(), stop, 1, 2
                place = RankPlace(rank, size, entry, block, setting)
                server.fork(place, Descriptors(*files, setting.channel))
    return ranks


def note_server_message(ranks: Sequence[RankProcess], server: RankGroup) -> bool:
    """Record the end of a rank, or of all if the fork server is gone. Return whether it exists."""
    message = server.next_message()
    if isinstance(message, RankEnded):
        ranks[message.rank].end(message.returncode)
    elif message is None:
        returncode = server.returncode()
        for one in ranks:
            one.end(returncode)
    return message is not None
