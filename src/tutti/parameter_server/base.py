"""The contracts of a parameter centre and of its rule, as strategies see them.

A centre has one vector of weights for each of a replica's flat vectors. It is cut into slots, each a slice of
every vector; a message is applied to one slot after the other, and no other worker reads or moves a slot
meanwhile.

    weights   ├───────── slot 0 ─────────┼───────── slot 1 ─────────┼───────── slot 2 ─────────┤
    worker 0      lock, rule, unlock ──────▶ lock, rule, unlock ──────▶ ...
    worker 1                                                           lock, rule, unlock ──▶ back to slot 0
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

import torch
from torch import Tensor

from tutti.optim.sharded import equal_slices
from tutti.replica import Flat, copy_all
from tutti.state import LocalState, Named, Saved, State

Vectors: TypeAlias = Sequence[Tensor]
"""One vector for each of `Replica.flats`, of the same lengths and dtypes."""

Allocate: TypeAlias = Callable[[int, torch.dtype], Tensor]
"""(length, dtype) -> a vector of zeros, where all who apply a rule to one slot can see it."""


@dataclass(frozen=True)
class Slot:
    """A part of the centre that is locked, moved and counted as one: a slice of each vector."""

    number: int
    places: tuple[slice, ...]

    def views(self, vectors: Vectors) -> tuple[Tensor, ...]:
        """Return the slot's slice of each vector."""
        return tuple(vector[place] for vector, place in zip(vectors, self.places, strict=True))


def slots_of(slices: Sequence[Sequence[slice]]) -> list[Slot]:
    """Return the slots that consist of the k-th slices of all vectors; empty ones are left out."""
    columns = zip(*slices, strict=True)
    filled = [places for places in columns if any(place.start < place.stop for place in places)]
    return [Slot(number, places) for number, places in enumerate(filled)]


@dataclass(slots=True)
class Push:
    """A message for one slot."""

    slot: int
    centre: tuple[Tensor, ...]  # the slot's weights
    message: tuple[Tensor, ...]
    reply: tuple[Tensor, ...] | None  # where the answer goes, maybe `message`; None: no answer
    then: tuple[Tensor, ...] | None = None  # the weights it was computed at, if the rule `compares`
    staleness: int = 0  # the number of other workers' messages applied since this one last read the slot


class Outcome(Enum):
    """The result of a message."""

    APPLIED = "the slot has moved; the answer can be given"
    WAITING = "the slot moves with a later message; the answer has to wait for that"
    DROPPED = "it came too late and was not used; the answer can be given"


class Rule(ABC):
    """The use of a message by a centre. Each process that applies the rule has its own object."""

    compares: bool = False  # it needs `Push.then`
    remembers: bool = False  # a worker's last message may be applied again
    brings_weights: bool = False  # messages are weights; else moves or gradients

    def cut(self, flats: Sequence[Flat], parts: int) -> list[Slot]:
        """Cut the vectors into at most `parts` slots that the rule can be applied to."""
        return slots_of([equal_slices(flat, parts) for flat in flats])

    def open(self, centre: Vectors, slots: Sequence[Slot], allocate: Allocate) -> None:
        """Prepare for `slots` of `centre`; called once, by all processes that apply the rule (collective)."""
        return

    @abstractmethod
    def apply(self, push: Push) -> Outcome:
        """Move `push.centre` by `push.message`, in place. The message may be overwritten."""

    def answer(self, push: Push) -> None:
        """Write the answer into `push.reply`; by default the centre's weights."""
        assert push.reply is not None
        copy_all(push.reply, push.centre)

    def settings(self) -> list[float]:
        """Return the settings that may change between messages, such as the learning rate."""
        return []

    def use(self, settings: list[float]) -> None:
        """Apply the next message with its sender's settings."""
        return

    def state(self, slot: int) -> LocalState:
        """Return a slot's state besides the weights, by parameter; not while the slot is moved."""
        return LocalState()

    def load_state(self, held: Named) -> None:
        """Continue from what `state` returned for all slots; called once per shared memory."""
        return

    @abstractmethod
    def above(self, hosts: int) -> Rule:
        """Return the rule of the centre above, whose workers are the hosts' centres."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """Measurements of an exchange with the centre."""

    staleness: int | None  # others' messages since this worker's last read, in the stalest slot
    age_s: float  # seconds since this worker's last read
    wait_s: float  # seconds that it waited for others
    bytes_sent: int  # sent, or written for others to read
    dropped: bool = False  # whether its message came too late and was not used, in some slot
    update_s: float = 0.0  # seconds in which this worker applied the rule


class Centre(ABC):
    """The weights that all workers see. Made by `join_centre`; one object for each worker."""

    @property
    @abstractmethod
    def version(self) -> int:
        """The number of messages that the centre has applied, as far as this worker knows."""

    @property
    def ready(self) -> bool:
        """False while the centre cannot be reached: the next exchange has to wait."""
        return True

    @abstractmethod
    def push(self, message: Vectors, again: bool = False, at: Vectors = ()) -> Receipt:
        """Push a message, which may be overwritten, without an answer.

        With `again` it is this worker's last message, unchanged, which the centre may remember. `at` are the
        weights at which it was computed, if the rule `compares`.
        """

    def pull(self, into: Vectors) -> Receipt:
        """Read the centre's weights; staleness counts from here on."""
        raise NotImplementedError

    @abstractmethod
    def exchange(self, message: Vectors, reply: Vectors | None = None, at: Vectors = ()) -> Receipt:
        """Push a message and pull the answer, by default into the message, as one operation in each slot."""

    @abstractmethod
    def read(self, into: Vectors) -> None:
        """Read the agreed weights, the same for every worker; the staleness stays (collective)."""

    def tick(self, slack: int, into: Vectors) -> Receipt:
        """Count a step, wait until no other worker is more than `slack` steps behind, and read the weights.

        Workers that have left are not waited for. The staleness is the last pushed message's.
        """
        raise NotImplementedError

    def leave(self) -> None:
        """Push nothing until `rejoin`; no worker waits for this one. Repeated calls do nothing."""
        return

    def rejoin(self) -> None:
        """Come back after `leave` (collective: all count their steps from zero again)."""
        return

    def state(self) -> State:
        """Return the state besides the agreed weights; called between `leave` and `rejoin`."""
        return State()

    def load_state(self, saved: Saved) -> None:
        """Continue from the state of an earlier centre with the same weights (collective)."""
        return

    @abstractmethod
    def close(self) -> None:
        """End this worker's connection; no call may follow."""
