"""A worker's view of a centre that is a process of its own, on any host: both may be lost and come back.

    worker    │ round │ exchange │ round │ exch ✂ lost │ its round goes on: no exchange │ exchange │ round ...
    thread                                      connect? ... connect? ... joined ──────┘

A message that was cut off has been applied or not. The centre keeps the number of each worker's last
message, and says it when the worker joins again; from then on nothing that came by an earlier connection
is applied. So the worker knows whether the centre has the message; if not, it adds it to the next one.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Sequence
from threading import Thread
from typing import Any, Final

import torch
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.errors import PeerLost, UserError
from tutti.parameter_server.base import Centre, Receipt, Rule, Vectors
from tutti.parameter_server.wire import LOST, Link, describe, join
from tutti.replica import Flat, copy_all
from tutti.state import Saved, State
from tutti.terminal import say_on_stderr, warn_on_stderr

PATIENCE_S: Final = 60.0
"""How long a worker waits for the centre where it cannot go on by itself: at its begin and its end."""

MOST_PAUSE_S: Final = 5.0
"""The longest time between two attempts to connect."""


class RemoteCentre(Centre):
    """One rank's view of a centre that listens at an address; each rank is a worker of that centre.

    The ranks of `comm` meet only to read the agreed weights. The centre keeps its own state.

    Args:
        comm: the ranks of this run.
        flats: the weights of this rank. They become the centre's, or if it has some, are overwritten by them.
        rule: its settings travel with each message.
        address: "HOST:PORT".
        key: the centre's.

    Raises:
        BadOption, BadModel: the centre has another key or another model.
        PeerLost: it cannot be reached within `PATIENCE_S`.
    """

    def __init__(
        self, comm: Communicator, flats: Sequence[Flat], rule: Rule, address: str, key: bytes
    ) -> None:
        self._comm, self._rule, self._address, self._key = comm, rule, address, key
        self._weights = [flat.weights for flat in flats]
        self._worker = {"worker": secrets.token_hex(8), "model": describe(flats)}
        # The message that the centre may not have yet, if `held`; `number` counts those that it has.
        self._message = [torch.zeros_like(weights, device="cpu") for weights in self._weights]
        self._held, self._number = False, 0
        self._version, self._seen, self._seen_at = 0, 0, comm.clock()
        self._link: Link | None = None
        self._found: tuple[Link, dict[str, Any]] | UserError | None = None
        self._closed, self._lost_at = False, 0.0
        self._search()
        if not self._wait() or self._ask(self._weights) is None:
            raise PeerLost((), f"no centre answers at {address}; start one with 'tutti centre --listen'")
        self._seen = self._version

    @property
    @override
    def version(self) -> int:
        return self._version

    @property
    @override
    def ready(self) -> bool:
        if self._found is not None:
            self._take_up()
        return self._link is not None

    def _take_up(self) -> None:
        """Go on with the connection that the thread has made."""
        found, self._found = self._found, None
        if isinstance(found, UserError):
            raise found
        assert found is not None
        self._link, answer = found
        # A centre that was set back to an earlier state has a smaller number.
        self._held = self._held and answer["begun"] and answer["number"] <= self._number
        self._number = answer["number"]
        if not answer["begun"]:
            self._begin(self._link)

    def _begin(self, link: Link) -> None:
        """Give the centre its first weights."""
        copy_all(self._message, self._weights)
        try:
            link.send({"begins": True, "reads": False}, self._message)
            link.receive()
        except LOST as error:
            self._lose(error)

    def _lose(self, error: Exception) -> None:
        assert self._link is not None
        self._link.close()
        self._link = None
        why = str(error) or "it has closed the connection"
        warn_on_stderr(f"lost the centre at {self._address} ({why}); this worker goes on by itself")
        self._search()

    def _search(self) -> None:
        self._lost_at = time.monotonic()
        Thread(target=self._connect, name="centre-search", daemon=True).start()

    def _connect(self) -> None:
        """Connect and join, as often as it takes."""
        pause, draw = 0.25, random.SystemRandom()
        while not self._closed:
            try:
                self._found = join(self._address, self._key, self._worker)
                if pause > 0.25:
                    waited = time.monotonic() - self._lost_at
                    say_on_stderr(f"joined the centre at {self._address} after {waited:.0f} s")
                return
            except UserError as error:
                self._found = error
                return
            except LOST as error:
                if pause == 0.25:
                    warn_on_stderr(f"cannot reach the centre at {self._address} ({error}); trying again")
                pause = min(2 * pause, MOST_PAUSE_S)
                time.sleep(pause * draw.uniform(0.5, 1.0))

    def _wait(self) -> bool:
        """Wait until the centre is there, but not longer than `PATIENCE_S` after it was lost."""
        while not self.ready:
            if time.monotonic() > self._lost_at + PATIENCE_S:
                return False
            time.sleep(0.02)
        return True

    def _ask(self, into: Vectors | None) -> int | None:
        """Bring the message that is held, and read; return the bytes sent, None: the connection was lost."""
        link = self._link
        assert link is not None
        request: dict[str, Any] = {"reads": into is not None, "settings": self._rule.settings()}
        if self._held:
            request["number"] = self._number + 1
        try:
            sent = link.send(request, self._message if self._held else ())
            self._version = link.receive()["version"]
            self._number += self._held
            self._held = False
            if into is not None:
                link.receive_into(self._message)
                copy_all(into, self._message)
        except LOST as error:
            self._lose(error)
            return None
        return sent

    def _bring(self, message: Vectors, into: Vectors | None) -> Receipt:
        clock = self._comm.clock
        began, seen = clock(), self._seen
        if not self.ready:
            return Receipt(None, began - self._seen_at, 0.0, 0, dropped=True)
        for held, vector in zip(self._message, message, strict=True):
            if self._held:
                held.add_(vector.cpu())
            else:
                held.copy_(vector)
        self._held = True
        sent = self._ask(into)
        now = clock()
        age_s = now - self._seen_at
        if sent is None:
            return Receipt(None, age_s, now - began, 0)
        if into is not None:
            self._seen, self._seen_at = self._version, now
        return Receipt(max(0, self._version - 1 - seen), age_s, now - began, sent)

    @override
    @torch.no_grad()
    def push(self, message: Vectors, again: bool = False, at: Vectors = ()) -> Receipt:
        """Push the last message of this worker: wait for the centre if it cannot be reached."""
        self._wait()
        receipt = self._bring(message, None)
        if receipt.dropped:
            warn_on_stderr(f"the centre at {self._address} does not get this worker's last batches")
        return receipt

    @override
    @torch.no_grad()
    def exchange(self, message: Vectors, reply: Vectors | None = None, at: Vectors = ()) -> Receipt:
        """Push and pull; if the connection is lost meanwhile, the reply stays as it was."""
        return self._bring(message, message if reply is None else reply)

    @override
    @torch.no_grad()
    def read(self, into: Vectors) -> None:
        """Read the centre's weights, the same on all ranks of this run; they stay if it cannot be reached."""
        self._comm.barrier()
        if self._comm.rank == 0 and not (self.ready and self._ask(into) is not None):
            warn_on_stderr(
                f"the centre at {self._address} cannot be reached: this worker's own weights stand in"
            )
        if self._comm.size > 1:
            for vector in into:
                self._comm.broadcast(vector)

    @override
    def pull(self, into: Vectors) -> Receipt:
        raise NotImplementedError

    @override
    def tick(self, slack: int, into: Vectors) -> Receipt:
        raise NotImplementedError

    @override
    def leave(self) -> None:
        """Do nothing: no worker waits for another."""

    @override
    def rejoin(self) -> None:
        """Do nothing."""

    @override
    def state(self) -> State:
        return State()

    @override
    def load_state(self, saved: Saved) -> None:
        """Do nothing: the centre has gone on meanwhile."""

    @override
    def close(self) -> None:
        self._closed = True
        if self.ready:
            assert self._link is not None
            self._link.close()
            self._link = None
