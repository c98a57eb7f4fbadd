"""The progress engine of a group: it runs the operations, and waits for the other ranks.

    caller      │ starts an operation ── runs it as long as no rank keeps it waiting for long ──▶ done
                │                                    │ else, without async_op
                │                                    ▼
                │                       waits: runs all that is under way, naps between
                │ with async_op: goes on
    progress    │ . . . . . . . . . . . runs operations that no caller waits for, naps between

Collectives run one after the other, in the order of the calls; messages run beside them. The thread
that holds the lock runs them: an operation is a generator, which two threads must not enter. The progress
thread is started when it is first needed.

    caller    [1] nothing before it: run it with the lock, for as long as a spin lasts; done, or
              [2] put it in the queue   [3] without async_op, or in `wait`: register in `_waiting`
              [4] run all that is under way, nap   [5] when done: withdraw, wake the thread if any is left
    thread    [6] sleep while a caller is registered or the queue is empty
              [7] run all that is under way, nap, until a caller registers or the queue is empty; go to [6]

- No wake-up is lost: [2], [5] and the test of [6] hold the lock, and waiting for the condition lets go of it
  and sleeps in one step. What is in the queue has a caller that runs it, or an awake thread.
- `_waiting`, `done` and `_thread` are read without the lock in the tests of [4] and [7]. A thread that reads
  an old value goes one round more, and a round takes the lock before it runs anything. Threads of one process
  see each other's stores in order, as the interpreter's own lock passes between them.
- The order in which the ranks see each other's stores rests on the barrier and the rings (`tutti.comm.shm`),
  in whichever thread they run.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from tutti.comm.shm.fence import fence
from tutti.comm.shm.liveness import LEFT_EARLY, Backoff, Peers
from tutti.errors import PeerLost
from tutti.torch_backend.errors import Absent, Closed
from tutti.torch_backend.work import Operation

if TYPE_CHECKING:
    from tutti.comm.reductions import Reduction
    from tutti.comm.shm.barrier import Steps
    from tutti.comm.shm.point_to_point import Receiving

SPIN_S: Final = 200e-6
"""Time for which the caller runs an operation before it yields the core."""

MOVING_S: Final = 10.0
"""Longest time of data on their way from another host: a gigabyte at a gigabit per second."""


class ProgressEngine:
    """Runs the operations of one rank of a group."""

    def __init__(
        self,
        peers: Peers,  # the group's processes on this host
        global_ranks: Sequence[int],
        absent: Callable[[], list[int]],  # returns the ranks that have not come to the current collective
        has_left: Callable[[int], bool],
        timeout_s: float,  # of an operation
        remote: bool = False,  # some ranks are on other hosts
    ) -> None:
        self.lock = threading.Lock()  # held by the thread that runs operations
        self.timeout_s = timeout_s
        self._peers, self._global_ranks = peers, tuple(global_ranks)
        self._absent, self._has_left = absent, has_left
        self._moving_s = MOVING_S if remote else None
        self._spin_s = 0.0 if peers.crowded else SPIN_S
        self._wake = threading.Condition(self.lock)
        self._collectives: deque[Operation] = deque()
        self._messages: list[Operation] = []
        self._waiting: list[threading.Thread] = []
        self._broken: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._threads: list[threading.Thread] = []
        self._stopped = False

    def collective(
        self,
        steps: Steps,
        outputs: Sequence[Tensor],
        what: str,
        asynchronous: bool,
        timeout_s: float | None = None,
    ) -> Operation | None:
        """Run a collective after the earlier ones; return it only if `asynchronous` and unfinished."""
        with self.lock:
            if not self._collectives and self._broken is None:
                try:
                    if self._spin(steps):  # [1]
                        return Operation.over(outputs) if asynchronous else None
                except Exception as error:
                    return _fail(error, asynchronous)
            operation = self._enqueue(steps, outputs, what, asynchronous, timeout_s)
        if asynchronous:
            return operation
        operation.wait()
        return None

    def _enqueue(
        self,
        steps: Steps,
        outputs: Sequence[Tensor],
        what: str,
        asynchronous: bool,
        timeout_s: float | None = None,
    ) -> Operation:
        """Queue a collective; call this with the lock."""
        self._check(what)
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        operation = Operation(self, steps, outputs, what, self._absent, limit_s)
        self._collectives.append(operation)  # [2]
        # A caller that waits runs it itself.
        if asynchronous:
            self._wake_thread()
        return operation

    def _check(self, what: str) -> None:
        if self._broken is not None:
            raise Closed(f"{what} cannot go on: {self._broken}") from self._broken

    def immediate(
        self,
        begin: Callable[[Tensor, Reduction], Steps | None],
        tensor: Tensor,
        reduction: Reduction,
        what: str,
        asynchronous: bool,
    ) -> Operation | None:
        """Run a collective that usually ends at once; `begin` returns the remaining steps, or None."""
        with self.lock:
            if self._broken is None and not self._collectives:
                try:
                    steps = begin(tensor, reduction)
                except Exception as error:
                    return _fail(error, asynchronous)
                if steps is None:
                    return Operation.over((tensor,)) if asynchronous else None
            else:
                steps = _begun(begin, tensor, reduction)
            operation = self._enqueue(steps, (tensor,), what, asynchronous)
        if asynchronous:
            return operation
        operation.wait()
        return None

    def message(
        self,
        steps: Steps,
        outputs: Sequence[Tensor],
        what: str,
        absent: Callable[[], list[int]],
        receiving: Receiving | None = None,
    ) -> Operation:
        """Run a send or receive beside the collectives; the arguments are those of `Operation`."""
        operation = Operation(self, steps, outputs, what, absent, self.timeout_s, receiving)
        with self.lock:
            self._check(what)
            ended: list[Operation] = []
            self._advance(operation, ended)
            if not operation.done:
                self._messages.append(operation)
                self._wake_thread()
        return operation

    def _spin(self, steps: Steps) -> bool:
        """Run an operation while others work on it too; return whether it is done."""
        started = 0.0
        for tries, moves in enumerate(steps):
            if moves:
                started = 0.0
            elif tries & 0xF == 0xF or not self._spin_s:
                # Every sixteenth time: to ask for the time costs as much as a try.
                now = time.monotonic()
                started = started or now
                if now - started >= self._spin_s:
                    return False
        return True

    def finish(self, operation: Operation, timeout_s: float = 0.0) -> None:
        """Wait until an operation is over; run it, and all others, meanwhile."""
        this = threading.current_thread()
        with self.lock:
            self._waiting.append(this)  # [3]
        try:
            limit = time.monotonic() + timeout_s if timeout_s > 0 else float("inf")
            pause = Backoff(self._peers, self._moving_s)
            while not operation.done:  # [4]
                if self._run():
                    pause = Backoff(self._peers, self._moving_s)
                    continue
                if time.monotonic() > limit and not operation.done:
                    raise Absent(operation.what, self._named(operation.absent()), timeout_s)
                self._rest(pause)
        finally:
            with self.lock:
                self._waiting.remove(this)  # [5]
                if self._stopped:
                    self._wake.notify_all()
                if not self._waiting and (self._collectives or self._messages):
                    self._wake_thread()

    def _run(self) -> bool:
        """Run the operations that can proceed; return whether any did."""
        moved, ended = False, list[Operation]()
        with self.lock:
            while self._collectives and self._advance(self._collectives[0], ended):
                moved = True
                if self._collectives and self._collectives[0].done:
                    self._collectives.popleft()
            for operation in tuple(self._messages):
                if self._advance(operation, ended):
                    moved = True
                    if operation.done and operation in self._messages:
                        self._messages.remove(operation)
        self._publish(ended)
        return moved

    def _publish(self, ended: Sequence[Operation]) -> None:
        """Resolve the futures of ended operations.

        Their callbacks may wait for other operations without running them: then another thread must.
        """
        observed = [operation for operation in ended if operation.has_future]
        if not observed:
            return
        this = threading.current_thread()
        with self.lock:
            serves, held = this is self._thread, self._waiting.count(this)
            self._waiting = [thread for thread in self._waiting if thread is not this]
            if serves:
                self._thread = None
            if self._collectives or self._messages:
                self._wake_thread()
        try:
            for operation in observed:
                operation.publish()
        finally:
            with self.lock:
                self._waiting += [this] * held
                if serves and self._thread is None:
                    self._thread = this

    def _advance(self, operation: Operation, ended: list[Operation]) -> bool:
        try:
            # Tensors of inference mode can be written only in that mode, and all others in it as well.
            with torch.inference_mode():
                moved = operation.advance()
            if operation.done:
                operation.end(None)
            elif not operation.deadline_s:
                operation.deadline_s = time.monotonic() + operation.timeout_s
        except BaseException as error:
            operation.end(error)
            if not isinstance(error, Exception):
                raise
            moved = True
        if operation.done:
            ended.append(operation)
        return moved

    def _rest(self, pause: Backoff) -> None:
        """Wait a moment; notice ranks that are dead, have left, or are late."""
        try:
            if pause.rest():
                self._check_peers()
        except (PeerLost, Absent) as error:
            self.fail(error)

    def _check_peers(self) -> None:
        self._peers.check()
        with self.lock:
            heads = [*list(self._collectives)[:1], *self._messages]
        now = time.monotonic()
        for operation in heads:
            missing = operation.absent()
            left = [rank for rank in missing if self._has_left(rank)]
            if left and set(left) >= set(operation.absent()):
                fence()
                # A rank may have sent what we wait for just before it left.
                if not self._run() and not operation.done:
                    raise PeerLost(self._named(left), LEFT_EARLY)
            if operation.deadline_s and now > operation.deadline_s and not operation.done:
                raise Absent(operation.what, self._named(missing), operation.timeout_s)

    def _named(self, ranks: Sequence[int]) -> list[int]:
        return [self._global_ranks[rank] for rank in ranks]

    def fail(self, error: BaseException) -> None:
        """End all operations under way with an error; no other can follow."""
        with self.lock:
            self._broken = self._broken or error
            ended = [*self._collectives, *self._messages]
            self._collectives.clear()
            self._messages.clear()
            for operation in ended:
                operation.end(error)
        self._publish(ended)

    # --- the thread

    def _wake_thread(self) -> None:
        """Wake a thread to run the operations under way; call this with the lock."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="tutti progress", daemon=True)
            self._threads = [*(thread for thread in self._threads if thread.is_alive()), self._thread]
            self._thread.start()
        elif not self._waiting:
            self._wake.notify()

    def _serve(self) -> None:
        this = threading.current_thread()
        while self._thread is this:
            with self.lock:
                while self._waiting or not (self._collectives or self._messages):  # [6]
                    if self._stopped:
                        return
                    self._wake.wait()
            pause = Backoff(self._peers, self._moving_s)
            # [7] Another thread serves if a callback kept this one (`_publish`); this one then ends.
            while self._thread is this and not self._waiting and (self._collectives or self._messages):
                if self._stopped:
                    return
                if self._run():
                    pause = Backoff(self._peers, self._moving_s)
                else:
                    self._rest(pause)

    def close(self) -> None:
        """Stop: operations under way fail, callers that wait for them return, the thread ends."""
        this = threading.current_thread()
        self.fail(Closed("the process group was destroyed"))
        with self.lock:
            self._stopped = True
            self._wake.notify_all()
            self._wake.wait_for(lambda: all(thread is this for thread in self._waiting))
            threads = [thread for thread in self._threads if thread is not this]
        # A thread that is still in a callback when Python ends would abort the process.
        for thread in threads:
            thread.join()


def _fail(error: Exception, asynchronous: bool) -> Operation:
    if not asynchronous:
        raise error
    return Operation.failed(error)


def _begun(begin: Callable[[Tensor, Reduction], Steps | None], tensor: Tensor, reduction: Reduction) -> Steps:
    rest = begin(tensor, reduction)
    if rest is not None:
        yield from rest
