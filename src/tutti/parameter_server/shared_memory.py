"""The centre in the shared memory of one host, without a server: workers apply their own messages.

    worker 0   lock 0 │ rule, copy answer │ lock 1 │ rule, copy answer │ ...
    worker 1            lock 1 │ rule, copy answer │ lock 2 │ ...          each begins at its own slot

Nothing is sent, and no other process has to run: an exchange takes less than half the time of one with a
server on the same host.

A worker that has to wait, for a step to close or for the slowest worker, notes that and sleeps in `recv`;
the worker that ends its wait sends it a message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from operator import is_

import torch
from torch import Tensor
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.parameter_server.base import Centre, Outcome, Push, Receipt, Rule, Slot, Vectors
from tutti.parameter_server.ssp_clock import SharedSteps
from tutti.replica import Flat, copy_all
from tutti.state import LocalState, Saved, State

SMALLEST_SLOT = 1 << 19
"""Elements of a slot, at the least: locking and calling cost little beside the work on them."""

CLOSED_TAG = 1 << 20
"""A slot's number is added to it: the step that a message waits for is closed."""

_KEPT_VIEWS = 8


class SharedCentre(Centre):
    """One worker's view of a centre in shared memory (collective over the host's workers `comm`).

    It starts with worker 0's weights, in `parts` slots; by default one for each worker, of at least
    `SMALLEST_SLOT` elements.
    """

    def __init__(
        self, comm: Communicator, flats: Sequence[Flat], rule: Rule, parts: int | None = None
    ) -> None:
        self._comm, self._rule = comm, rule
        self.weights = [comm.shared(len(flat.weights), dtype=flat.weights.dtype) for flat in flats]
        if comm.rank == 0:
            copy_all(self.weights, [flat.weights for flat in flats])
        comm.barrier()
        self.slots = rule.cut(flats, parts or slots_for(flats, comm.size))
        count = len(self.slots)
        # As a memoryview an element is read in 0.1 us; as a tensor it takes ten times that.
        self._versions = comm.shared(count, dtype=torch.int64).numpy().data
        # Whether a worker sleeps until a slot moves; a row for each slot.
        self._waiting = comm.shared(count, comm.size, dtype=torch.int64).numpy().data
        self._locks = comm.locks(count)
        self._steps = SharedSteps(comm)
        self._seen = [0] * count
        self._seen_at = comm.clock()
        first = comm.rank * count // comm.size
        self._order = [*range(first, count), *range(first)]
        self._views: deque[tuple[Vectors, list[tuple[Tensor, ...]]]] = deque(maxlen=_KEPT_VIEWS)
        self._at = self.views(self.weights)
        self._nbytes = sum(vector.nbytes for vector in self.weights)
        self._note = torch.zeros(1)
        self._staleness = 0
        rule.open(self.weights, self.slots, lambda length, dtype: comm.shared(length, dtype=dtype))

    @property
    @override
    def version(self) -> int:
        return min(self._versions)

    def views(self, vectors: Vectors) -> list[tuple[Tensor, ...]]:
        """Return each slot's slices of `vectors`; the same objects for the same vectors."""
        for known, views in self._views:
            if all(map(is_, known, vectors)):
                return views
        views = [slot.views(vectors) for slot in self.slots]
        self._views.append((tuple(vectors), views))
        return views

    @override
    @torch.no_grad()
    def push(self, message: Vectors, again: bool = False, at: Vectors = ()) -> Receipt:
        return self._visit(message, None, again, at)

    @override
    @torch.no_grad()
    def exchange(self, message: Vectors, reply: Vectors | None = None, at: Vectors = ()) -> Receipt:
        return self._visit(message, message if reply is None else reply, False, at)

    def _visit(self, message: Vectors, reply: Vectors | None, again: bool, at: Vectors) -> Receipt:
        messages = self.views(message)
        replies = self.views(reply) if reply is not None else None
        clock, rule, wait_s, update_s, staleness = self._comm.clock, self._rule, 0.0, 0.0, 0
        waiting, dropped, then = [], False, self.views(at) if at else None
        for number in self._order:
            answer = replies[number] if replies is not None else None
            push = Push(number, self._at[number], messages[number], answer, then[number] if then else None)
            came = clock()
            with self._locks[number]:
                entered = clock()
                wait_s += entered - came
                push.staleness = self._versions[number] - self._seen[number]
                staleness = max(staleness, push.staleness)
                outcome = rule.apply(push)
                update_s += clock() - entered
                sleepers = []
                if outcome is Outcome.APPLIED:
                    self._versions[number] += 1
                    self._seen[number] += 1
                    sleepers = self._wake(number)
                dropped = dropped or outcome is Outcome.DROPPED
                if answer is not None and outcome is not Outcome.WAITING:
                    self._answer(push)
            for sleeper in sleepers:
                self._comm.send(self._note, sleeper, tag=CLOSED_TAG + number)
            if outcome is Outcome.WAITING and answer is not None:
                waiting.append(push)
        for push in waiting:
            wait_s += self._wait(push)
        self._staleness, age_s = staleness, clock() - self._seen_at
        if replies is not None:
            self._seen_at = clock()
        return Receipt(staleness, age_s, wait_s, 0 if again else self._nbytes, dropped, update_s)

    def _answer(self, push: Push) -> None:
        self._rule.answer(push)
        self._seen[push.slot] = self._versions[push.slot]

    def _wait(self, push: Push) -> float:
        """Sleep until the slot has moved, and answer; returns the seconds."""
        came, number = self._comm.clock(), push.slot
        while True:
            with self._locks[number]:
                if self._versions[number] > self._seen[number]:
                    self._answer(push)
                    return self._comm.clock() - came
                self._waiting[number, self._comm.rank] = 1
            self._comm.recv(self._note, tag=CLOSED_TAG + number)

    def _wake(self, number: int) -> list[int]:
        """Return the workers that sleep until the slot moves; each is to be sent a note."""
        sleepers = [rank for rank in range(self._comm.size) if self._waiting[number, rank]]
        for rank in sleepers:
            self._waiting[number, rank] = 0
        return sleepers

    @override
    @torch.no_grad()
    def pull(self, into: Vectors) -> Receipt:
        replies, clock, wait_s, staleness = self.views(into), self._comm.clock, 0.0, 0
        for number in self._order:
            came = clock()
            with self._locks[number]:
                wait_s += clock() - came
                staleness = max(staleness, self._versions[number] - self._seen[number])
                copy_all(replies[number], self._at[number])
                self._seen[number] = self._versions[number]
        age_s, self._seen_at = clock() - self._seen_at, clock()
        return Receipt(staleness, age_s, wait_s, 0)

    @override
    @torch.no_grad()
    def read(self, into: Vectors) -> None:
        self._comm.barrier()
        copy_all(into, self.weights)
        self._comm.barrier()

    @torch.no_grad()
    def overwrite(self, weights: Vectors) -> None:
        """Continue from other weights, the same for every worker (collective)."""
        self._comm.barrier()
        if self._comm.rank == 0:
            copy_all(self.weights, weights)
        self._comm.barrier()
        self._seen[:] = self._versions
        self._seen_at = self._comm.clock()
        self._comm.barrier()

    @torch.no_grad()
    def copy(self, into: Vectors) -> None:
        """Read the weights without an effect on the staleness."""
        parts = self.views(into)
        for number in self._order:
            with self._locks[number]:
                copy_all(parts[number], self._at[number])

    @torch.no_grad()
    def move(self, by: Vectors) -> None:
        """Add to the weights; it counts as a message."""
        parts = self.views(by)
        for number in self._order:
            with self._locks[number]:
                for weights, part in zip(self._at[number], parts[number], strict=True):
                    weights.add_(part)
                self._versions[number] += 1
                self._seen[number] += 1

    @override
    def tick(self, slack: int, into: Vectors) -> Receipt:
        wait_s = self._steps.tick(slack)
        read = self.pull(into)
        return replace(read, staleness=self._staleness, wait_s=wait_s + read.wait_s)

    @override
    def leave(self) -> None:
        self._steps.leave()

    @override
    def rejoin(self) -> None:
        self._comm.barrier()
        self._steps.rejoin()
        self._comm.barrier()

    @override
    def state(self) -> State:
        """Return what the rule keeps, each rank for some slots."""
        return State(self.held(self.slots[self._comm.rank :: self._comm.size]))

    def held(self, slots: Sequence[Slot]) -> LocalState:
        """Return what the rule keeps for some slots."""
        held = LocalState()
        for slot in slots:
            held.add(self._rule.state(slot.number))
        return held

    @override
    def load_state(self, saved: Saved) -> None:
        if self._comm.rank == 0:
            self._rule.load_state(saved.joint)
        self._comm.barrier()

    @override
    def close(self) -> None:
        """Do nothing: there is no server to inform."""


def slots_for(flats: Sequence[Flat], workers: int) -> int:
    """Return the number of slots in shared memory: enough that all workers can be busy at once."""
    most = sum(len(flat.weights) for flat in flats) // SMALLEST_SLOT
    return max(1, min(workers, most))
