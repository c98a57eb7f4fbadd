"""Meetings of the ranks of a user's own loop: each brings a row of words, and sees the rows of all.

    rank 0   REDUCE  iteration 1  batch 6  parameters 0 1 2 3       all alike: go on
    rank 1   REDUCE  iteration 1  batch 6  parameters 0 1 2 3

    rank 0   REDUCE  iteration 1  batch 6  parameters 0 1 2 3       apart: all raise, naming each rank's place
    rank 1   MEAN    iteration 1  batch 6

Every collective call of such a loop begins with a meeting, so that ranks whose loops go different ways fail
with a message instead of waiting for each other.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import IntEnum
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor

from tutti.comm.base import Communicator
from tutti.errors import BadOption, PeerLost

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Purpose(IntEnum):
    """A rank's reason to come to a meeting, and the program's call."""

    place: str

    def __new__(cls, number: int, place: str = "") -> Purpose:
        """Make a member."""
        purpose = int.__new__(cls, number)
        purpose._value_, purpose.place = number, place
        return purpose

    REDUCE = 1, "backward()"
    STEP = 2, "optimizer.step()"
    DEAL = 3, "tutti.shard()"
    MEAN = 4, "tutti.mean()"
    TOTAL = 5, "tutti.total()"
    DISTRIBUTE = 6, "tutti.distribute()"
    BUFFERS = 7, "tutti.average_buffers()"
    KEEP = 8, "tutti.checkpoints()"
    SAVE = 9, "save()"
    RESTORE = 10, "restore()"


HEAD: Final = 3
"""Words of purpose, iteration and batch; behind them come the purpose's own words."""

DETAILS: Final = 4
"""The most words that a purpose other than REDUCE has."""

MOST_KNOWN: Final = 256
"""Rows of words that are kept for the next time."""


class Meetings:
    """The meetings of all ranks."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        # This rank's training iterations over `shard`, batches dealt in them, and optimizer steps.
        self.iterations = self.batches = self.steps = 0
        self._thread: int | None = None
        self._known: dict[tuple[int, ...], tuple[Tensor, NDArray[np.int64]]] = {}
        self._width, self._turn = HEAD + DETAILS, 0
        self._tables: Tensor | None = None

    def widen(self, parameters: int) -> None:
        """Make room for a word for each parameter; all ranks do so between the same two meetings."""
        self._known, self._width, self._tables = {}, HEAD + max(DETAILS, parameters), None

    def come(self, purpose: Purpose, *details: int, touched: Sequence[int] = ()) -> Tensor | None:
        """Wait for all ranks, with at most `DETAILS` integers for them (collective).

        `touched` are the numbers of the parameters whose gradients this rank brings. Return every rank's
        details or touched parameters, (ranks, words); None if all equal this rank's.
        """
        if self._comm.size == 1:
            return None
        if self._thread not in (None, get_ident()):
            raise BadOption(
                "two threads of this rank use tutti, and the ranks may meet in another order in each; fetch "
                "batches ahead inside of shard(), as in shard(Prefetcher(loader)), or let the loader do it "
                "(num_workers, prefetch_factor)"
            )
        self._thread = get_ident()
        words, numbers = self._words(purpose, details, touched)
        numbers[1], numbers[2] = self.iterations, self.batches
        try:
            table = self._gather(words)
            if torch.equal(table, words.expand_as(table)):
                return None
            if not torch.equal(table[:, :HEAD], words[:HEAD].expand(len(table), HEAD)):
                self._refuse(table)
        except PeerLost as error:
            here = f"rank {self._comm.rank} is in {purpose.place} ({_line()}) after {self.steps} steps"
            why = f"{error.why}; {here}: every rank must make the same steps and the same calls of tutti"
            raise PeerLost(error.ranks, why) from None
        return table[:, HEAD:]

    def _refuse(self, table: Tensor) -> None:
        lines = cast("list[str]", self._comm.all_gather_objects(_line()))
        where = "; ".join(
            f"rank {rank} is in {Purpose(row[0]).place} ({line}, training batch {row[2]})"
            for rank, (row, line) in enumerate(zip(table.tolist(), lines, strict=True))
        )
        raise BadOption(
            f"the ranks went different ways through the loop after {self.steps} steps: {where}. Decide by "
            "what is the same on all ranks, such as tutti.mean(loss), when to leave the loop or a batch out"
        )

    def _words(
        self, purpose: Purpose, details: Sequence[int], touched: Sequence[int]
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """Return the row of this rank, and the same as an array, whose words are faster to write."""
        key = (purpose, *details, -1, *touched)
        known = self._known.get(key)
        if known is None:
            with torch.inference_mode(False):  # they outlive an evaluation that begins with a meeting
                words = torch.zeros(self._width, dtype=torch.int64)
            words[0] = purpose
            for at, detail in enumerate(details, HEAD):
                words[at] = detail
            for number in touched:
                words[HEAD + number] = 1
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            known = self._known[key] = words, words.numpy()
        return known

    def _gather(self, mine: Tensor) -> Tensor:
        """Return every rank's words, (ranks, words)."""
        if self._comm.hosts > 1:
            table = torch.zeros(self._comm.size, len(mine), dtype=mine.dtype)
            table[self._comm.rank] = mine
            self._comm.all_gather(table.view(-1))
            return table
        if self._tables is None:
            # Two tables, used in turn: who writes to one has met all who have read it.
            with torch.inference_mode(False):
                self._tables = self._comm.node.shared(2, self._comm.size, self._width, dtype=torch.int64)
        self._turn ^= 1
        table = self._tables[self._turn]
        table[self._comm.rank].copy_(mine)
        self._comm.barrier()
        return table


def _line() -> str:
    """Return the program's innermost current line that is neither ours nor torch's."""
    libraries = tuple(str(Path(module.__file__ or "").parent) for module in (sys.modules["tutti"], torch))
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*libraries, "<")):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
