"""Runs several ranks in one process, in every order in which their accesses to shared memory can interleave.

The code under test is the real one. Its shared memory is `Words` and `SharedRows`, which give the turn back
before each access; `explore` takes every turn that could come next. A state is what lies in memory, and what
each rank has seen so far, which together determine all that follows: no state is gone through twice.

A store is performed at once (`Order.SEQUENTIAL`), or stays in its rank's store buffer for a time: until then
the rank alone sees it. Buffers are emptied first in, first out (`Order.TOTAL_STORE`, as on x86), or in any
order between two fences (`Order.PARTIAL_STORE`).

Sources: Godefroid 1997, "Model checking for programming languages using VeriSoft", POPL (the search over
schedules of real code); Sewell et al. 2010, "x86-TSO", Communications of the ACM 53 (store buffers).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import greenlet
import torch
from torch import Tensor
from typing_extensions import override

Programs = Sequence[Callable[[], object]]
"""What each rank does; made anew for every order that is tried."""


class Order(Enum):
    """The order in which other ranks see a rank's stores."""

    SEQUENTIAL = "as they are made, at once"
    TOTAL_STORE = "as they are made, later"
    PARTIAL_STORE = "in any order between two fences"


@dataclass(frozen=True)
class Store:
    """A store that other ranks do not see yet.

    Attributes:
        place: which word, or "rows", or "header".
        value: what is written.
        perform: writes it.
    """

    place: int | str
    value: object
    perform: Callable[[], None]


class Broken(AssertionError):
    """An order in which a rank fails, or all of them wait."""


class Execution:
    """One run of all ranks, turn by turn.

    Args:
        build: makes the shared memory and the ranks' programs.
        order: in which other ranks see stores.
    """

    def __init__(
        self,
        build: Callable[[Execution], Programs],
        order: Order = Order.SEQUENTIAL,
    ) -> None:
        self._order = order
        self.memory: Tensor = torch.zeros(0, dtype=torch.uint8)
        self.words: list[int] = []
        self._hub = greenlet.getcurrent()
        programs = build(self)
        size = len(programs)
        self._ranks = [greenlet.greenlet(program) for program in programs]
        self._buffers: list[list[Store]] = [[] for _ in programs]
        self._seen, self._seen_before = [0] * size, [0] * size
        self._done = [0] * size
        self._waits, self._blocked_at = [False] * size, [-1] * size
        self._version = self._current = 0
        for rank in range(size):
            self._go(rank)

    # --- what the code under test calls

    @property
    def rank(self) -> int:
        """The rank whose turn it is."""
        return self._current

    def access(self, stores: bool = False) -> None:
        """Give the turn back before an access to shared memory; a store into a buffer is none yet."""
        rank = self._current
        if stores and self._order is not Order.SEQUENTIAL:
            return
        self._seen_before[rank] = self._seen[rank]
        if self._waits[rank]:
            self._waits[rank], self._blocked_at[rank] = False, self._version
        self._hub.switch()
        self._seen[rank] = hash((self._seen[rank], "access"))

    def saw(self, value: object) -> None:
        """Note what the rank has just loaded."""
        self._seen[self._current] = hash((self._seen[self._current], value))

    def store(self, store: Store) -> None:
        """Perform a store, now or later."""
        if self._order is Order.SEQUENTIAL:
            self._perform(store)
        else:
            self._buffers[self._current].append(store)

    def own(self, place: int) -> int | None:
        """What this rank's own buffer has for a word."""
        for store in reversed(self._buffers[self._current]):
            if store.place == place:
                assert isinstance(store.value, int)
                return store.value
        return None

    def fence(self) -> None:
        """Perform what this rank has stored so far."""
        buffer = self._buffers[self._current]
        while buffer:
            self._flush(self._current, 0)

    def finish(self, steps: Any) -> None:
        """Run an operation to its end, as a blocking caller does."""
        for moved in steps:
            if not moved:
                # What was loaded last was not there yet: the rank is where it was before.
                rank = self._current
                self._seen[rank], self._waits[rank] = self._seen_before[rank], True
        # However it came about, the rank is now where every order should take it.
        self._done[self._current] += 1
        self._seen[self._current] = self._done[self._current]

    # --- what `explore` calls

    def choices(self) -> list[tuple[int, int]]:
        """Whose turn may be next: (rank, -1), or (rank, number of the store to perform)."""
        found = [
            (rank, -1)
            for rank, runner in enumerate(self._ranks)
            if not runner.dead and self._blocked_at[rank] < self._version
        ]
        for rank, buffer in enumerate(self._buffers):
            last = len(buffer) if self._order is Order.PARTIAL_STORE else min(1, len(buffer))
            first_of = {store.place: number for number, store in reversed(list(enumerate(buffer)))}
            found += [(rank, number) for number in range(last) if first_of[buffer[number].place] == number]
        return found

    def take(self, choice: tuple[int, int]) -> None:
        """Let a rank go on to its next access, or perform one of its stores."""
        rank, number = choice
        if number >= 0:
            self._flush(rank, number)
        else:
            self._blocked_at[rank] = -1
            self._go(rank)

    @property
    def ended(self) -> bool:
        """Whether all ranks are done."""
        return all(rank.dead for rank in self._ranks)

    def state(self) -> int:
        """All that determines what may follow."""
        buffers = tuple(tuple((store.place, store.value) for store in buffer) for buffer in self._buffers)
        blocked = tuple(at >= self._version for at in self._blocked_at)
        ended = tuple(rank.dead for rank in self._ranks)
        memory = bytes(self.memory.numpy())
        return hash((tuple(self.words), memory, tuple(self._seen), buffers, blocked, ended))

    def close(self) -> None:
        """End ranks that are under way."""
        for rank in self._ranks:
            if not rank.dead:
                rank.throw()

    def _go(self, rank: int) -> None:
        self._current = rank
        self._ranks[rank].switch()

    def _flush(self, rank: int, number: int) -> None:
        self._perform(self._buffers[rank].pop(number))

    def _perform(self, store: Store) -> None:
        store.perform()
        # Who waits, waits for words: data that others store meanwhile cannot end it.
        self._version += isinstance(store.place, int)


class Words:
    """Words in shared memory.

    Args:
        execution: whose memory it is.
        count: their number.
        writers: of words that one rank only stores, that rank. What it loads there it has stored itself, so
            that no order of the others' stores matters: it needs no turn for that.
    """

    def __init__(self, execution: Execution, count: int, writers: Mapping[int, int] | None = None) -> None:
        self._execution, self._values, self._writers = execution, execution.words, writers or {}
        self._values.extend([0] * count)

    def __getitem__(self, place: int) -> int:
        if self._writers.get(place) == self._execution.rank:
            own = self._execution.own(place)
            return self._values[place] if own is None else own
        self._execution.access()
        own = self._execution.own(place)
        value = self._values[place] if own is None else own
        self._execution.saw(value)
        return value

    def __setitem__(self, place: int, value: int) -> None:
        self._execution.access(stores=True)
        self._execution.store(Store(place, int(value), lambda: self._values.__setitem__(place, int(value))))


class SharedRows(Tensor):
    """Rows in shared memory. Views of it are shared, too; what is computed from it is not."""

    execution: Execution

    VIEWS: Final = frozenset(
        {"view", "__getitem__", "transpose", "data_ptr", "__get__", "numel", "__len__", "size"}
    )

    @classmethod
    @override
    def __torch_function__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        options = options or {}
        if function.__name__ in cls.VIEWS:
            return super().__torch_function__(function, types, arguments, options)
        execution = cls.execution
        plain = [_plain(argument) for argument in arguments]
        out = options.get("out", arguments[0] if function.__name__.endswith("_") else None)
        stores = function is Tensor.copy_ and isinstance(out, SharedRows)
        execution.access(stores)
        if stores:
            target, source = _plain(out), plain[1].clone()
            execution.store(
                Store("rows", (target.data_ptr(), bytes(source.numpy())), lambda: target.copy_(source))
            )
            return out
        execution.fence()
        for argument in arguments:
            if isinstance(argument, SharedRows):
                execution.saw(bytes(_plain(argument).contiguous().view(torch.uint8).numpy()))
        found = function(*plain, **{name: _plain(value) for name, value in options.items()})
        return out if out is not None else found


def _plain(value: Any) -> Any:
    return value.as_subclass(Tensor) if isinstance(value, SharedRows) else value


class SharedHeaders:
    """A ring in shared memory, as words.

    Attributes:
        bytes: the same memory.
    """

    def __init__(self, execution: Execution) -> None:
        self._execution, self._values = execution, execution.memory.view(torch.int64)
        self.bytes = execution.memory.as_subclass(SharedRows)

    def __getitem__(self, part: slice) -> list[int]:
        self._execution.access()
        values: list[int] = self._values[part].tolist()
        self._execution.saw(tuple(values))
        return values

    def __setitem__(self, at: int, value: int) -> None:
        self._execution.access(stores=True)
        self._execution.store(Store("header", value, lambda: self._values.__setitem__(at, value)))


class SharedArena:
    """As much of an arena as a group's rows need, or one ring.

    Args:
        execution: whose memory it is.
        nbytes: its length.
    """

    def __init__(self, execution: Execution, nbytes: int) -> None:
        self._execution = execution
        execution.memory = torch.zeros(nbytes, dtype=torch.uint8)
        SharedRows.execution = execution

    def tensor(self, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The rows."""
        del offset
        return self._execution.memory.view(dtype).view(shape).as_subclass(SharedRows)

    def words(self, offset: int, count: int) -> SharedHeaders:
        """The ring."""
        del offset, count
        return SharedHeaders(self._execution)

    def move(self, to: int, source: int, nbytes: int) -> None:
        """Move bytes between addresses, as `memmove` does."""
        execution, memory = self._execution, self._execution.memory
        stores = memory.data_ptr() <= to < memory.data_ptr() + memory.numel()
        execution.access(stores)
        if stores:
            content = ctypes.string_at(source, nbytes)
            execution.store(
                Store("rows", (to - memory.data_ptr(), content), lambda: _write(to, content, nbytes))
            )
        else:
            execution.fence()
            execution.saw(ctypes.string_at(source, nbytes))
            ctypes.memmove(to, source, nbytes)


def _write(to: int, content: bytes, nbytes: int) -> None:
    ctypes.memmove(to, content, nbytes)


def explore(build: Callable[[Execution], Programs], order: Order = Order.SEQUENTIAL) -> int:
    """Run the programs in every order.

    Returns:
        How many states there are.

    Raises:
        Broken: in some order a rank fails, or all wait for ever.
    """
    seen: set[int] = set()
    todo: list[tuple[tuple[int, int], ...]] = [()]
    while todo:
        path = list(todo.pop())
        execution = Execution(build, order)
        try:
            for choice in path:
                execution.take(choice)
            while (state := execution.state()) not in seen:
                seen.add(state)
                choices = execution.choices()
                if not choices:
                    if not execution.ended:
                        raise Broken(f"all ranks wait for ever after {path}")
                    break
                todo += [(*path, choice) for choice in choices[1:]]
                path.append(choices[0])
                execution.take(choices[0])
        except Exception as error:
            if isinstance(error, Broken):
                raise
            raise Broken(f"{type(error).__name__}: {error}, after {path}") from error
        finally:
            execution.close()
    return len(seen)
