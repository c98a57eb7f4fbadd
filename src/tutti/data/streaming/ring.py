"""The windows in memory: one that the ranks of a host compute on, and the next, which a thread reads.

    slot 0      │ window 0 │      reads window 2      │ window 2 ...
    slot 1      │ reads window 1 │ window 1           │ reads window 3 ...
    rank 0      │ computes on window 0 │ on window 1  │ on window 2 ...
    rank 1      │ computes on window 0   │ on window 1 │ on window 2 ...

The ranks of a host share the key of the window in each slot, and the keys of the windows that each rank uses.
No rank waits for another one:

1. The loader marks a slot as empty.      1. A rank writes the keys of its windows to its place.
2. It lets the processor's stores arrive.  2. Likewise.
3. If a rank uses the window, it stays.    3. If a slot has the window, the samples are taken from there.

A sample that is in no slot, as its rank is far ahead of the others or behind them, is read from its file. So
are all where the loader makes no progress, as the disk hangs, or the rank that has it was killed or stopped.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Final

import numpy as np
from torch import Tensor

from tutti.data.rows import Array, Indices
from tutti.data.streaming.windows import WindowOrder, Windows

SLOTS: Final = 2
"""Windows in memory: the one in use and the next."""

_EMPTY: Final = 0
_POLL_S: Final = 0.0005
_STUCK_S: Final = 10.0
"""The seconds without a block that the loader has read after which nobody waits for it."""

_HEAD: Final = 2 + SLOTS
"""True if the loader reads, the keys of the windows that it wants to have read, and the blocks read."""

_READS: Final = 0
_WANTED: Final = slice(1, 1 + SLOTS)
_PROGRESS: Final = 1 + SLOTS


class Ring:
    """The windows in the memory of a host, as one of its ranks sees them.

    Args:
        windows: how the samples lie.
        memory: of shape (SLOTS * largest window, ...), shared by the ranks of the host.
        control: of `control_size` numbers, int64, zero at first, shared likewise.
        rank: of this process on its host. The first one has the loader.
        ranks: of the host.
        read: writes the samples from one position of the part on into an array.

    Attributes:
        waited_s: the seconds that this rank has waited for a window.
    """

    def __init__(
        self,
        windows: Windows,
        memory: Tensor,
        control: Tensor,
        rank: int,
        ranks: int,
        read: Callable[[int, Array], None],
    ) -> None:
        self.windows, self.memory, self._read = windows, memory, read
        state = control.numpy()
        self._head, self._slots = state[:_HEAD], state[_HEAD : _HEAD + SLOTS]
        self._pins = state[_HEAD + SLOTS :].reshape(ranks, 2)
        self._rank = rank
        self._where = np.full(windows.all_blocks, -1)
        self._at: tuple[int, int] | None = None
        self._mapped: list[Indices] = []
        self._is_mapped = self._is_ahead = False
        self._failed: Exception | None = None
        self._loader: threading.Thread | None = None
        self._ahead: list[tuple[WindowOrder, int]] = []
        self.waited_s = 0.0

    @staticmethod
    def control_size(ranks: int) -> int:
        """Return how many numbers the ranks of a host share."""
        return _HEAD + SLOTS + 2 * ranks

    def enter(self, order: WindowOrder, samples: Tensor) -> None:
        """Go on to some samples: wait for their windows, if they are being read.

        Args:
            order: of the epoch.
            samples: their positions in the part, in the order of the epoch.

        Raises:
            BadData: a file cannot be read any more, or has been changed.
        """
        first, last = order.window_of(int(samples[0])), order.window_of(int(samples[-1]))
        at = order.key(first), order.key(last)
        if at != self._at:
            self._at, self._pins[self._rank] = at, at
            self._is_mapped = self._is_ahead = False
            os.sched_yield()  # 2. A system call: what was stored is seen before what is read below.
        if self._rank == 0 and not self._is_ahead and not self._reads_for(order, first):
            self._is_ahead = self._read_from(order, first)
        if self._is_mapped:
            return
        self._wait(at)
        if self._failed is not None:
            raise self._failed
        self._is_mapped = self._map(order, first, last)

    def places(self, samples: Indices) -> Indices:
        """Return the rows of the memory that samples are in, by their positions; -1: they are in none."""
        block = self.windows.block
        blocks, within = np.divmod(samples, block)
        starts: Indices = self._where[blocks]
        return starts + within if starts.min(initial=0) >= 0 else np.where(starts < 0, -1, starts + within)

    def _wait(self, keys: tuple[int, int]) -> None:
        """Wait for windows that are being read, as long as there is progress."""
        began = moved = time.perf_counter()
        read = int(self._head[_PROGRESS])
        while not all(key in self._slots for key in keys) and self._comes(keys):
            time.sleep(_POLL_S)
            now = time.perf_counter()
            if read != self._head[_PROGRESS]:
                read, moved = int(self._head[_PROGRESS]), now
            elif now - moved > _STUCK_S:
                self._head[_READS] = 0  # No rank waits again before there is progress.
        self.waited_s += time.perf_counter() - began

    def _comes(self, keys: tuple[int, int]) -> bool:
        """Tell whether a window that is lacking will come without any other rank's doing."""
        missing = [key for key in keys if key not in self._slots]
        return bool(self._head[_READS]) and all(key in self._head[_WANTED] for key in missing)

    def _reads_for(self, order: WindowOrder, first: int) -> bool:
        """Tell whether the loader still reads what is wanted from this window on."""
        alive = self._loader is not None and self._loader.is_alive()
        return alive and self._head[_WANTED][0] == order.key(first)

    def _map(self, order: WindowOrder, first: int, last: int) -> bool:
        """Note where the blocks of both windows are; returns whether they are in the memory."""
        for blocks in self._mapped:
            self._where[blocks] = -1
        self._mapped = []
        # A window between them is read from its files: nothing keeps the loader from its slot.
        for number in {first, last}:
            found = np.flatnonzero(self._slots == order.key(number))
            if len(found):  # 3.
                blocks = order.blocks(number)
                sizes = [len(self.windows.span(int(block))) for block in blocks]
                before = np.concatenate([[0], np.cumsum(sizes)[:-1]])
                self._where[blocks] = int(found[0]) * self.windows.largest + before
                self._mapped.append(blocks)
        return len(self._mapped) == len({first, last})

    def _read_from(self, order: WindowOrder, first: int) -> bool:
        """Have a window and those behind it read; returns whether they are there."""
        self._ahead = self._behind(order, first)
        wanted = [one.key(number) for one, number in self._ahead]
        self._head[_WANTED] = wanted
        if self._failed is not None or all(key in self._slots for key in wanted):
            return True
        # One that still reads looks for what is wanted after each window.
        if self._loader is None or not self._loader.is_alive():
            self._head[_READS] = 1
            self._loader = threading.Thread(target=self._run, name="tutti-read-ahead", daemon=True)
            self._loader.start()
        return False

    def _behind(self, order: WindowOrder, first: int) -> list[tuple[WindowOrder, int]]:
        """Return a window and the next ones, which may be those of the next epoch."""
        found, count = [], self.windows.count
        for number in range(first, first + SLOTS):
            later = number // count
            of = order if not later else self.windows.order(order.seed, order.epoch + later)
            found.append((of, number % count))
        return found

    def _run(self) -> None:
        """Read what is wanted until it is there, or no slot is free."""
        try:
            while True:
                ahead = self._ahead
                wanted = [one.key(number) for one, number in ahead]
                missing = [one for one, key in zip(ahead, wanted, strict=True) if key not in self._slots]
                slot = self._free_slot(wanted) if missing else None
                if slot is None:
                    return
                self._fill(slot, *missing[0])
        except Exception as error:  # The rank raises it, whatever it is.
            self._failed = error
        finally:
            self._head[_READS] = 0

    def _free_slot(self, wanted: list[int]) -> int | None:
        """Empty a slot whose window nobody wants; None: there is none."""
        for slot in range(SLOTS):
            key = int(self._slots[slot])
            if key in wanted:
                continue
            self._slots[slot] = _EMPTY  # 1.
            os.sched_yield()  # 2.
            if key == _EMPTY or key not in self._pins:  # 3.
                return slot
            self._slots[slot] = key
        return None

    def _fill(self, slot: int, order: WindowOrder, number: int) -> None:
        memory, start = self.memory.numpy(), slot * self.windows.largest
        for block in order.blocks(number):
            span = self.windows.span(int(block))
            self._read(span.start, memory[start : start + len(span)])
            start += len(span)
            self._head[_PROGRESS] += 1
            self._head[_READS] = 1
        self._slots[slot] = order.key(number)


def ring_shape(windows: Windows, rows: Tensor) -> tuple[int, ...]:
    """Return the shape of a ring's memory for samples like `rows`, of shape (samples, ...)."""
    return (SLOTS * windows.largest, *rows.shape[1:])
