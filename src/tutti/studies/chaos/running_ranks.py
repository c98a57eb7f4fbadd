"""The ranks of a training, as a process that has no part in it sees them: in the memory that they share.

    training's process ── /proc/PID/fd ──► arena ──► process and steps of each rank

The ranks store there how many steps they have made: `tutti.comm.shm.layout`. Nothing is stored
from here. No torch.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Final

from tutti.comm.shm.arena import FIRST, Arena
from tutti.comm.shm.layout import BEAT, FIRST_STEP, LINE, PID, ControlLayout
from tutti.comm.shm.memfd import FileAddress

MOST_RANKS: Final = 60
"""The ranks that are looked at: those whose lines are on the first page, whatever their number."""

_SEARCH_S: Final = 0.02
"""Time between two searches for groups of ranks, while some rank of those that are known is gone."""

_ARENA: Final = "/memfd:tutti (deleted)"


@dataclass(frozen=True)
class RankSeen:
    """A rank that lives.

    Attributes:
        process: its number.
        steps: how many updates are made; None: it does something else than to train.
    """

    process: int
    steps: int | None


class RunningRanks:
    """The ranks that a process has had started.

    Args:
        starter: its number.
    """

    def __init__(self, starter: int) -> None:
        self._starter = starter
        self._arenas: dict[int, memoryview] = {}
        self._trained = 0
        self._over: set[int] = set()
        self._search_again = 0.0
        self._servers: set[int] = set()

    def look(self) -> dict[int, RankSeen]:
        """The ranks that live and have found each other, by their numbers.

        Where several groups of ranks live, as one is being ended, they are those of the group that
        trains, or has trained last.
        """
        groups, broken = self._look()
        # It takes cores of those that are to go on.
        if not groups or (broken and time.monotonic() >= self._search_again):
            self._search_again = time.monotonic() + _SEARCH_S
            self._arenas = dict(self._found())
            groups, broken = self._look()
        for file, ranks in groups.items():
            # What is left of a group that has lost a rank, or was replaced, takes a while to end.
            over = file == self._trained or file in self._over or file in broken
            if not over and any(one.steps is not None for one in ranks.values()):
                self._over.add(self._trained)
                self._trained = file
        return groups.get(self._trained) or next(iter(groups.values()), {})

    def groups(self) -> frozenset[int]:
        """The groups of ranks that there are, by the numbers of their arenas."""
        return frozenset(file for file, _ in self._found())

    def successors(self, before: Collection[int], known: Collection[int]) -> dict[int, RankSeen]:
        """The ranks that take over from lost ones.

        Args:
            before: the groups that there were just before the loss.
            known: the processes of the ranks that trained.
        """
        self._arenas = dict(self._found())
        groups, _ = self._look()
        return {
            rank: one
            for file, ranks in groups.items()
            if file not in before
            for rank, one in ranks.items()
            if one.process not in known
        }

    def _look(self) -> tuple[dict[int, dict[int, RankSeen]], set[int]]:
        """The ranks of each arena that is known and has any, and the arenas some of whose ranks are gone."""
        groups: dict[int, dict[int, RankSeen]] = {}
        broken: set[int] = set()
        for file, words in self._arenas.items():
            for rank in range(MOST_RANKS):
                line = LINE * (1 + rank)
                process, beat = words[line + PID], words[line + BEAT]
                if process == 0:
                    break
                if self._is_rank(process):
                    groups.setdefault(file, {})[rank] = RankSeen(
                        process, (beat & ~FIRST_STEP) - 1 if beat else None
                    )
                else:
                    broken.add(file)
        return groups, broken

    def _found(self) -> Iterator[tuple[int, memoryview]]:
        """Yield the arenas of the starter, each with the number of its file."""
        folder = f"/proc/{self._starter}/fd"
        with suppress(OSError):
            for name in os.listdir(folder):
                with suppress(OSError, ValueError):
                    if os.readlink(f"{folder}/{name}") == _ARENA:
                        arena = Arena.open(FileAddress(self._starter, int(name)))
                        # A mapping that is not used any more is given back, and with it the memory.
                        words = arena.words(FIRST, ControlLayout(MOST_RANKS).line(MOST_RANKS))
                        file = os.fstat(arena.fd).st_ino
                        arena.close()
                        yield file, words

    def _is_rank(self, process: int) -> bool:
        """Tell whether a process lives and was forked by a server of the starter's."""
        state, parent = _state_and_parent(process)
        if state in "ZX":
            return False
        if parent not in self._servers and self._starter in _ancestors(parent):
            self._servers.add(parent)
        return parent in self._servers


class Victim:
    """A process that is sent signals, and never another one that has got its number.

    Args:
        process: its number.
    """

    def __init__(self, process: int) -> None:
        self._file: int | None = None
        with suppress(ProcessLookupError):
            self._file = os.pidfd_open(process)

    def send(self, signum: int) -> None:
        """Send it a signal, if it is still there."""
        if self._file is not None:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._file, signum)

    def close(self) -> None:
        """Let it go on if it was stopped, and forget it."""
        self.send(signal.SIGCONT)
        if self._file is not None:
            os.close(self._file)
            self._file = None


@contextmanager
def unseen(processes: Collection[int]) -> Iterator[None]:
    """Keep the parents of processes from seeing any of them end, until all that is done here is done."""
    with ExitStack() as stack:
        for parent in {_state_and_parent(process)[1] for process in processes} - {0, 1}:
            server = Victim(parent)
            stack.callback(server.close)
            server.send(signal.SIGSTOP)
        yield


def _ancestors(process: int) -> Iterator[int]:
    while process > 1:
        _, process = _state_and_parent(process)
        yield process


def _state_and_parent(process: int) -> tuple[str, int]:
    """The state of a process in one letter, as in /proc, and its parent; "X" if it is gone."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            state, parent, *_ = file.read().rpartition(b")")[2].split()
            return state.decode(), int(parent)
    except (FileNotFoundError, ProcessLookupError):
        return "X", 0
