"""The meetings of the ranks of a user's own loop, by rows of words that say what each has come for.

    rank 0   REDUCE  iteration 1  batch 6  parameters 0 1 2 3       all alike: go on
    rank 1   REDUCE  iteration 1  batch 6  parameters 0 1 2 3

    rank 0   REDUCE  iteration 1  batch 6  parameters 0 1 2 3       gone apart: all say where each one is
    rank 1   MEAN    iteration 1  batch 6

Everything in which all ranks of such a loop take part begins with a meeting, so that ranks whose loops go
different ways are told which is where.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from threading import get_ident
from typing import TYPE_CHECKING, Final, cast

import torch
from torch import Tensor

from tutti.comm.base import Communicator
from tutti.errors import BadOption, CallsDiffer, PeerLost

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Purpose(IntEnum):
    """A rank's reason to come to a meeting, with the call of the program that it is in."""

    place: str

    def __new__(cls, number: int, place: str = "") -> Purpose:
        """Make a member of its number and its place."""
        purpose = int.__new__(cls, number)
        purpose._value_, purpose.place = number, place
        return purpose

    REDUCE = 1, "backward()"  # gradients of a backward pass become those of all ranks
    STEP = 2, "optimizer.step()"  # an optimizer moves the weights
    DEAL = 3, "tutti.shard()"  # rank 0 says which samples the next batches have
    MEAN = 4, "tutti.mean()"  # a figure is averaged
    TOTAL = 5, "tutti.total()"  # a figure is added up
    DISTRIBUTE = 6, "tutti.distribute()"  # a model and an optimizer are distributed
    SETTLE = 7, "tutti.settled()"  # a model gets the weights to be evaluated
    FINISH = 8, "tutti.finish()"  # a model gets its final weights
    KEEP = 9, "tutti.checkpoints()"  # a folder for checkpoints is opened
    SAVE = 10, "save()"  # what all ranks know is copied for a checkpoint
    RESTORE = 11, "restore()"  # all ranks go on from one


UPDATING: Final = (Purpose.REDUCE, Purpose.STEP)
"""Ranks that have come for one of these may meet others that have come for the other."""

DETAILS: Final = 5
"""Words for the other ranks, behind the purpose."""

ITERATION: Final = 1 + DETAILS
"""The word that says how many iterations over `shard` this rank has begun, to train."""

BATCH: Final = 2 + DETAILS
"""The word that says how many batches it was dealt in them."""

HEAD: Final = 3 + DETAILS
"""Words of a row before those for the parameters, which say whose gradients a rank brings."""

APART: Final = "the ranks went different ways through the loop"
REMEDY: Final = (
    "Decide by what is the same on all ranks, such as tutti.mean(loss), when to leave the loop or a batch out"
)

MOST_KNOWN: Final = 256
"""Rows of words that are kept for the next time."""


class Meetings:
    """The meetings of all ranks.

    Attributes:
        iterations: how many iterations over `shard` this rank has begun, to train.
        batches: how many batches it was dealt in them.
        steps: how many steps of optimizers it has made.
        dealing: the threads in which iterations over `shard` are under way.
    """

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self.iterations = self.batches = self.steps = 0
        self.dealing: list[int] = []
        self._known: dict[tuple[int, ...], tuple[Tensor, NDArray[np.int64]]] = {}
        self._width, self._turn = HEAD, 0
        self._tables: Tensor | None = None

    def refuse_other_threads(self) -> None:
        """Refuse that a thread is dealt batches while this one trains: which of them meets others first?

        Raises:
            BadOption: there is one.
        """
        if any(thread != get_ident() for thread in self.dealing):
            raise BadOption(
                "one thread goes through tutti.shard() and another one trains, so that ranks may meet in one "
                "order here and in another there; give shard() what fetches batches ahead, "
                "shard(Prefetcher(loader)), or let the loader do that (num_workers, prefetch_factor)"
            )

    def widen(self, parameters: int) -> None:
        """Make room for `parameters` words; all ranks do so between the same two meetings."""
        self._known, self._width, self._tables = {}, HEAD + parameters, None

    def come(
        self, purpose: Purpose, details: Sequence[int] = (), touched: Sequence[int] = ()
    ) -> Tensor | None:
        """Wait for all ranks (collective).

        Args:
            purpose: what this rank comes for.
            details: at most `DETAILS` integers for the others.
            touched: the parameters that it brings gradients of.

        Returns:
            Every rank's words, (ranks, words); None if all are this rank's.

        Raises:
            BadOption: the ranks' loops have gone apart.
            PeerLost: a rank has left, or is lost.
        """
        if self._comm.size == 1:
            return None
        if purpose in UPDATING:
            self.refuse_other_threads()
        words, numbers = self._words(purpose, details, touched)
        numbers[ITERATION], numbers[BATCH] = self.iterations, self.batches
        try:
            table = self._gather(words)
            if torch.equal(table, words.expand_as(table)):
                return None
            if _apart(table):
                self._refuse(table)
            return table
        except (PeerLost, CallsDiffer) as error:
            raise self.explain(error, purpose) from None

    @contextmanager
    def explaining(self, purpose: Purpose) -> Iterator[None]:
        """Explain errors of the ranks' communicator inside."""
        try:
            yield
        except (PeerLost, CallsDiffer) as error:
            raise self.explain(error, purpose) from None

    def explain(self, error: PeerLost | CallsDiffer, purpose: Purpose) -> PeerLost | BadOption:
        """Return the error that says where this rank's loop is, as others did not come there.

        Args:
            error: the communicator's.
            purpose: what this rank has come for.
        """
        steps = f"{_count(self.steps, 'step')} of its own"
        here = f"rank {self._comm.rank} is in {purpose.place} ({_line()}) after {steps}"
        if isinstance(error, PeerLost):
            must = "make the same steps" if purpose in UPDATING else "begin the same epochs over shard()"
            why = f"{error.why}; {here}, and every rank must {must}, and come to mean() and finish()"
            return PeerLost(error.ranks, why)
        calls = str(error).partition(";")[0]
        return BadOption(f"{APART}: {here}, and others are elsewhere ({calls}). {REMEDY}")

    def _refuse(self, table: Tensor) -> None:
        lines = cast("list[str]", self._comm.all_gather_objects(_line()))
        places: dict[str, list[int]] = {}
        for rank, (row, line) in enumerate(zip(table.tolist(), lines, strict=True)):
            batch = f", training batch {row[BATCH]}" if row[BATCH] else ""
            places.setdefault(f"in {Purpose(row[0]).place} ({line}{batch})", []).append(rank)
        where = "; ".join(f"{_ranks(ranks)} {place}" for place, ranks in places.items())
        raise BadOption(f"{APART} after {_count(self.steps, 'step')}: {where}. {REMEDY}")

    def _words(
        self, purpose: Purpose, details: Sequence[int], touched: Sequence[int]
    ) -> tuple[Tensor, NDArray[np.int64]]:
        """The row of this rank, and the same as an array, whose words are faster to write."""
        key = (purpose, *details, -1, *touched)
        known = self._known.get(key)
        if known is None:
            with torch.inference_mode(False):  # they outlive an evaluation that begins with a meeting
                words = torch.zeros(self._width, dtype=torch.int64)
            words[0] = purpose
            for at, detail in enumerate(details, 1):
                words[at] = detail
            for number in touched:
                words[HEAD + number] = 1
            if len(self._known) >= MOST_KNOWN:
                self._known.clear()
            known = self._known[key] = words, words.numpy()
        return known

    def _gather(self, mine: Tensor) -> Tensor:
        """Every rank's words, (ranks, words)."""
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


def _apart(table: Tensor) -> bool:
    """Return whether the ranks that have come with these words can never meet."""
    purposes = table[:, 0]
    if bool((purposes > max(UPDATING)).any()):
        return bool((purposes != purposes[0]).any())
    # One that leaves out the passes before a step is ahead of those that it helps with theirs.
    passing = purposes == Purpose.REDUCE
    return any(_differ(table[rows, ITERATION:HEAD]) for rows in (passing, ~passing))


def _differ(rows: Tensor) -> bool:
    return len(rows) > 1 and bool((rows != rows[0]).any())


def _line() -> str:
    """The innermost line of the program that is neither ours nor torch's, where this rank is now."""
    own = (str(contextlib.__file__), "<")
    libraries = tuple(str(Path(module.__file__ or "").parent) for module in (sys.modules["tutti"], torch))
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_filename.startswith((*libraries, *own)):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} is"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} are"
