"""Many ranks in one process, in virtual time: the rank with the smallest clock runs.

Every rank is a greenlet with a clock. It runs until its clock moves (`advance`), or until it must wait for
another rank (`block`). Then the scheduler (the *hub*) continues the rank with the smallest clock, the lower
rank first among equals. So events occur in the order of virtual time, on any machine.

    heap of (time, rank, stamp) ── smallest ──> resume that rank ──> its clock moves, or it wakes others ─┐
              ^───────────────────────────────────────────────────────────────────────────────────────────┘
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch
from greenlet import GreenletExit, getcurrent, greenlet
from torch import Tensor

from tutti.errors import PeerLost

_SHOWN: Final = 16
"""The most waiting ranks in the message of a deadlock."""

TICKS_PER_S: Final = 2.0**36
"""Times are whole ticks of 15 ps. So their sums are exact, and the order of ranks does not drift."""


def whole_ticks(time_s: float) -> float:
    """Round a time to whole ticks."""
    return round(time_s * TICKS_PER_S) / TICKS_PER_S


class Deadlock(RuntimeError):
    """All ranks wait for each other; the message says what each rank waits for."""


class Ended(GreenletExit):
    """Thrown into a rank that is killed, or whose world has ended. It ends the greenlet, and is no error."""


@dataclass(frozen=True)
class Fault:
    """The death of a rank, as after `kill -9`.

    Args:
        rank: numbered in the world.
        operation: the rank dies when it begins this operation, from 0; `compute` and `clock` do not count.
    """

    rank: int
    operation: int


@dataclass(frozen=True)
class Wait:
    """The condition that a blocked rank waits for. Ranks are numbered in the world."""

    what: str  # in words, such as "recv from rank 2"
    peers: Sequence[int]  # the ranks whose death ends the wait with `PeerLost`
    missing: Callable[[], Sequence[int]]  # returns the ranks that must act before the wait can end
    anyone: bool = False  # one of the missing ranks is enough


class TorchState:
    """The state that torch keeps per process or thread, and that each rank needs for itself."""

    __slots__ = ("autocast", "autocast_dtype", "forward_grad", "grad", "random")

    def __init__(self) -> None:
        self.random: Tensor = torch.default_generator.get_state()
        self.grad = torch.is_grad_enabled()
        # Functions of autograd switch it off while they compute, and may wait for other ranks meanwhile.
        self.forward_grad = torch._C._is_fwd_grad_enabled()
        self.autocast = torch.is_autocast_enabled("cpu")
        self.autocast_dtype = torch.get_autocast_dtype("cpu")

    def restore(self) -> None:
        """Restore this state of the thread."""
        torch.default_generator.set_state(self.random)
        if torch.is_grad_enabled() != self.grad:
            torch.set_grad_enabled(self.grad)
        torch._C._set_fwd_grad_enabled(self.forward_grad)
        if torch.is_autocast_enabled("cpu") != self.autocast:
            torch.set_autocast_enabled("cpu", self.autocast)
        torch.set_autocast_dtype("cpu", self.autocast_dtype)


@dataclass(eq=False)
class RankTask:
    """One rank of the world."""

    rank: int
    body: greenlet
    state: TorchState
    clock: float = 0.0
    stamp: int = 0
    due: float | None = None
    wait: Wait | None = None
    error: Exception | None = None
    operations: int = 0
    last_operation: int | None = None
    finished: bool = False
    lost: str = ""  # why it was killed
    on_death: list[Callable[[], None]] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """True if the rank has returned or was killed."""
        return self.finished or bool(self.lost)


class Scheduler:
    """Runs one function per rank in virtual time."""

    def __init__(self, functions: Sequence[Callable[[], object]], faults: Sequence[Fault] = ()) -> None:
        self.results: list[object] = [None] * len(functions)
        self._hub = getcurrent()
        self._over = False
        outside = TorchState()
        self.tasks = [
            RankTask(rank, self._greenlet(rank, run), outside) for rank, run in enumerate(functions)
        ]
        self._outside = outside
        self._heap = [(0.0, rank, 0) for rank in range(len(functions))]
        for task in self.tasks:
            task.due = 0.0
        for fault in faults:
            self.tasks[fault.rank].last_operation = fault.operation

    def run(self) -> None:
        """Run until every rank has returned or was killed. The first exception of a rank ends the run.

        Raises:
            Deadlock: all remaining ranks wait for each other.
        """
        try:
            self._left = len(self.tasks)
            while self._left:
                if not self._heap:
                    self._stalled()
                    continue
                time, rank, stamp = heapq.heappop(self._heap)
                task = self.tasks[rank]
                if stamp == task.stamp and not task.done:
                    task.clock, task.due, task.wait = time, None, None
                    task.state.restore()
                    task.body.switch()
        finally:
            # Unwind the ranks that still run.
            self._over = True
            for task in self.tasks:
                if not task.body.dead:
                    task.body.throw(Ended())
            self._outside.restore()

    def begin(self, task: RankTask, operation: str) -> None:
        """Count an operation that `task` begins; kill the task if a fault says so."""
        if self._over or task.done:
            raise Ended
        number = task.operations
        task.operations += 1
        if number == task.last_operation:
            self.kill(task, f"killed at operation {number} ({operation})")
            raise Ended

    def advance(self, task: RankTask, until: float) -> None:
        """Move the clock of the running `task`; ranks with smaller clocks run first."""
        task.stamp += 1
        until = whole_ticks(until)
        event = (until, task.rank, task.stamp)
        if self._heap and self._heap[0] < event:
            heapq.heappush(self._heap, event)
            task.due = until
            self._switch(task)
        else:
            task.clock = until

    def block(self, task: RankTask, wait: Wait) -> None:
        """Suspend the running `task` until another rank wakes it; raise the error that `wake` passes."""
        task.wait = wait
        self._switch(task)
        if task.error is not None:
            error, task.error = task.error, None
            raise error

    def wake(self, task: RankTask, at: float, error: Exception | None = None) -> None:
        """Let a blocked `task` continue at time `at`, unless it is due earlier."""
        at = whole_ticks(at)
        if task.due is None or at < task.due:
            task.stamp += 1
            task.due = at
            task.error = error
            heapq.heappush(self._heap, (at, task.rank, task.stamp))

    def kill(self, task: RankTask, why: str) -> None:
        """Mark `task` as dead, and wake the ranks that wait for it."""
        task.lost = why
        self._left -= 1
        for notify in task.on_death:
            notify()
        for other in self.tasks:
            waiting = other.wait if other.due is None and not other.done else None
            if waiting and task.rank in waiting.peers:
                self.wake(other, max(task.clock, other.clock), PeerLost([task.rank], why))

    def _greenlet(self, rank: int, function: Callable[[], object]) -> greenlet:
        def body() -> None:
            task = self.tasks[rank]
            try:
                self.results[rank] = function()
            except Exception as error:
                # Ignore errors in the clean-up of a dead rank: a killed process would not run it.
                if task.lost or self._over:
                    return
                error.add_note(f"(raised by virtual rank {rank} at {task.clock:g} s)")
                raise
            if not task.lost:
                task.finished = True
                self._left -= 1

        return greenlet(body, parent=self._hub)

    def _switch(self, task: RankTask) -> None:
        """Switch to the hub; return when the hub resumes `task`."""
        if torch.is_inference_mode_enabled():
            raise RuntimeError(
                "a virtual rank cannot wait for others inside torch.inference_mode(), as that affects all "
                "ranks; use torch.no_grad()"
            )
        task.state = TorchState()
        self._hub.switch()
        if self._over:
            raise Ended

    def _stalled(self) -> None:
        """Raise `PeerLost` in ranks that wait for one that has returned; without such ranks, `Deadlock`."""
        waiting = [task for task in self.tasks if not task.done]
        for task in waiting:
            wait = task.wait
            missing = wait.missing() if wait else ()
            left = [rank for rank in missing if self.tasks[rank].done]
            if left and wait and (not wait.anyone or len(left) == len(missing)):
                self.wake(
                    task, task.clock, PeerLost(left, f"left, but rank {task.rank} waits in {wait.what}")
                )
        if not self._heap:
            lines = [f"  rank {task.rank}: {task.wait.what}" for task in waiting[:_SHOWN] if task.wait]
            more = [f"  and {len(waiting) - _SHOWN} more"] if len(waiting) > _SHOWN else []
            raise Deadlock("\n".join([f"deadlock: all {len(waiting)} remaining ranks wait", *lines, *more]))
