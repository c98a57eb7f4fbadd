"""A centre in a separate process: workers join it over TCP, and leave, at any time.

    worker a   │ round │ exchange │ round │ exch ✂ lost │ its round goes on: no exchange │ exchange │ ...
      thread                                     connect? ... connect? ... joined ──────┘
    centre         c0 ───── c1 ─ c2 ── c3 ─ file ── c4 ── c5 ── c6 ─ file ── c7 ── c8 ───── c9 ...
    worker b   │ round │ exchange │ round │ exchange │ round ✝        │ join │ round │ exchange │ ...

Messages are JSON and vectors of raw bytes, so nothing that arrives is code. Nothing is encrypted:

    ◀── HMAC ──▶       both ends show that they have the key
    worker ─▶ centre   {"worker": id, "model": parameters, "vectors": [[length, dtype], ...]}
    centre ─▶ worker   {"begun": has it weights, "number": of the worker's last message}, or {"refused": why}
    worker ─▶ centre   {"number": n, "begins": ..., "reads": ..., "settings": [...]}, vectors if n is not 0
    centre ─▶ worker   {"version": v}, vectors if the worker reads

A message that was cut off has been applied or not. A worker that joins again learns the number of its last
message, and the centre applies nothing more from the earlier connection. So the worker knows whether the
message has arrived; if not, it adds it to the next one.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import struct
import time
from collections.abc import Sequence
from itertools import zip_longest
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Final, TypeAlias

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.errors import BadCheckpoint, BadModel, BadOption, PeerLost, UserError
from tutti.parameter_server.base import Centre, Push, Receipt, Slot, Vectors
from tutti.parameter_server.rules import DelayedNesterovRule
from tutti.records.files import replace_file
from tutti.replica import Flat, copy_all
from tutti.state import order_of
from tutti.terminal import warn_on_stderr

Header: TypeAlias = dict[str, Any]

LOST: Final = (OSError, EOFError)  # of a connection whose other end is gone, or silent within a message

SILENCE_S: Final = 30  # after which a peer that does not answer is lost
UNREACHABLE_S: Final = 10  # and one whose host does not acknowledge what was sent
PATIENCE_S: Final = 60.0  # of a worker that needs the centre, at its start and its end
MOST_PAUSE_S: Final = 5.0  # between two attempts to connect


class RemoteCentre(Centre):
    """One rank's view of the centre at "HOST:PORT". Each rank is a worker of it; ranks meet only to read.

    A new centre takes this rank's weights, which are otherwise overwritten by the centre's. The rule's
    settings (lr, momentum, and N or 0) travel with each message. The centre keeps its own state. PeerLost is
    raised if it cannot be reached within `PATIENCE_S`.
    """

    def __init__(
        self, comm: Communicator, flats: Sequence[Flat], settings: Sequence[float], address: str, key: bytes
    ) -> None:
        self._comm, self._settings, self._address, self._key = comm, settings, address, key
        self._weights = [flat.weights for flat in flats]
        self._worker = {
            "worker": secrets.token_hex(8),
            "model": [
                [name, list(parameter.shape), str(parameter.dtype), order_of(parameter)]
                for flat in flats
                for name, parameter in zip(flat.names, flat.parameters, strict=True)
            ],
            "vectors": [[len(one), str(one.dtype).removeprefix("torch.")] for one in self._weights],
        }
        # The message that the centre may lack, if `_held`: the first weights, if the centre `_begins`.
        self._message = [torch.zeros_like(weights, device="cpu") for weights in self._weights]
        self._held = self._begins = self._closed = False
        self._number, self._version, self._seen, self._seen_at = 0, 0, 0, comm.clock()
        self._connection: Connection | None = None
        self._found: tuple[Connection, Header] | UserError | None = None
        self._search()
        if not self._wait() or self._ask(self._weights) is None:
            self._closed = True
            start = f"tutti centre --listen {address} --keep FILE"
            raise PeerLost((), f"no centre answers at {address}; start one there with '{start}'")
        self._seen = self._version

    @property
    @override
    def version(self) -> int:
        return self._version

    @property
    @override
    def ready(self) -> bool:
        if self._found is None:
            return self._connection is not None
        result, self._found = self._found, None
        if isinstance(result, UserError):
            raise result
        self._connection, answer = result
        # A centre that was restored to an earlier state has a smaller number.
        self._held = self._held and not self._begins and answer["number"] <= self._number
        self._number, self._begins = answer["number"], not answer["begun"]
        if self._begins:
            self._hold(self._weights, add=False)
        return True

    def _hold(self, message: Vectors, add: bool) -> None:
        self._held = True
        for held, vector in zip(self._message, message, strict=True):
            held.copy_(held + vector.cpu() if add else vector)

    def _search(self) -> None:
        self._lost_at = time.monotonic()
        Thread(target=self._connect, name="centre-search", daemon=True).start()

    def _connect(self) -> None:
        """Connect and join, retrying as long as it takes."""
        pause = 0.0
        while not self._closed and self._found is None:
            try:
                self._found = _join(self._address, self._key, self._worker)
            except UserError as error:
                self._found = error
            except LOST as error:
                if not pause:
                    warn_on_stderr(
                        f"cannot reach the centre at {self._address} ({error}); trying again, for "
                        f"{PATIENCE_S:g} s if this run has not begun"
                    )
                pause = min(2 * pause + 0.5, MOST_PAUSE_S)
                time.sleep(pause)

    def _wait(self) -> bool:
        """Wait until the centre is reachable, at most `PATIENCE_S` after it was lost."""
        while not self.ready:
            if time.monotonic() > self._lost_at + PATIENCE_S:
                return False
            time.sleep(0.02)
        return True

    def _ask(self, into: Vectors | None) -> int | None:
        """Send the held message, and read; return the bytes sent, or None if the connection was lost."""
        connection, number = self._connection, self._number + 1 if self._held else 0
        assert connection is not None
        request: Header = {"number": number, "begins": self._begins, "reads": into is not None}
        request["settings"] = self._settings
        try:
            sent = _send(connection, request, self._message if number else ())
            self._version = json.loads(connection.recv_bytes())["version"]
            self._number, self._held, self._begins = number or self._number, False, False
            if into is not None:
                _receive_into(connection, self._message)
                copy_all(into, self._message)
        except LOST as error:
            connection.close()
            self._connection = None
            why = f"silent for {SILENCE_S} s" if isinstance(error, BlockingIOError) else str(error)
            warn_on_stderr(f"lost the centre at {self._address} ({why or 'closed'}); training continues")
            self._search()
            return None
        return sent

    def _bring(self, message: Vectors, into: Vectors | None) -> Receipt:
        began = self._comm.clock()
        if not self.ready:
            return Receipt(None, began - self._seen_at, 0.0, 0, dropped=True)
        if not self._begins:
            self._hold(message, add=self._held)
        sent, now = self._ask(into), self._comm.clock()
        age_s, staleness = now - self._seen_at, None
        if sent is not None:
            staleness = max(0, self._version - 1 - self._seen)
            self._seen, self._seen_at = self._version, now
        return Receipt(staleness, age_s, now - began, sent or 0)

    @override
    @torch.no_grad()
    def push(self, message: Vectors, again: bool = False, at: Vectors = ()) -> Receipt:
        """Push this worker's last message; wait for the centre if it cannot be reached."""
        self._wait()
        receipt = self._bring(message, None)
        while self._held and self._wait():
            self._ask(None)
        if self._held or receipt.dropped:
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
            warn_on_stderr(f"no centre at {self._address}: what is evaluated are this worker's own weights")
        for vector in into if self._comm.size > 1 else ():
            self._comm.broadcast(vector)

    @override
    def close(self) -> None:
        self._closed = True
        if self.ready and self._connection is not None:
            self._connection.close()
            self._connection = None


class RemoteServer:
    """The weights of a centre, the rule of `AsyncDiLoCo`, and the connections of its workers.

    A thread serves each connection: it receives without the lock, and moves the weights under it, so that a
    slow or stopped worker delays no other. `version` counts the messages applied.
    """

    def __init__(self, key: bytes, keep: Path, workers: int = 0) -> None:
        # `keep` is the file with the state; `workers` is N of the rule if its workers leave it open.
        self._key, self._keep, self._workers = key, keep, workers
        self._lock, self._begun, self._ended = Lock(), False, False
        self._connections: dict[str, Connection] = {}
        # The numbers of the workers' last messages, and the workers' description of their model.
        self._numbers: dict[str, int] = {}
        self._model: Header = {}
        self.version, self._saved = 0, -1
        if keep.exists():
            self._load()

    def listen(self, address: str) -> str:
        """Start serving workers; return the address, with the port chosen if it was 0."""
        host, port = _address_of(address)
        try:
            listener = socket.create_server((host, port))
        except OSError as error:
            raise BadOption(f"cannot listen at {address}: {error.strerror}; give another address") from error
        Thread(target=self._accept, args=(listener,), name="centre-accept", daemon=True).start()
        return f"{host}:{listener.getsockname()[1]}"

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                end, (host, *_) = listener.accept()
            except OSError as error:  # too many files, or the worker has gone
                warn_on_stderr(f"cannot accept a connection: {error.strerror}; trying again")
                time.sleep(1.0)
                continue
            Thread(target=self._serve, args=(end, host), name="centre-worker", daemon=True).start()

    @torch.no_grad()
    def _serve(self, end: socket.socket, host: str) -> None:
        """Serve a worker until its connection ends."""
        connection, worker = _connection_of(end), "an unknown worker"
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            model = json.loads(connection.recv_bytes())
            worker = model.pop("worker")
            answer = self._admit(worker, model, connection)
            print(f"+ {worker} at {host}", flush=True)
            _send(connection, answer)
            buffer = [torch.zeros_like(weights) for weights in self._weights]
            while "refused" not in answer and connection.poll(None):
                self._answer(worker, model, connection, buffer)
        except (*LOST, AuthenticationError) as error:
            print(f"- {worker} at {host}: {str(error) or 'it has left'}", flush=True)
        finally:
            with self._lock:
                if self._connections.get(worker) is connection:
                    del self._connections[worker]
            connection.close()

    def _admit(self, worker: str, model: Header, connection: Connection) -> Header:
        """Let a worker join, or refuse it; return the answer."""
        with self._lock:
            if not self._begun:
                self._lay_out(model)
            if model != self._model:
                pairs = zip_longest(self._model["model"], model["model"])
                own, other = next(pair for pair in pairs if pair[0] != pair[1])
                return {"refused": f"the centre's model has {own} where this has {other}; train the same one"}
            self._connections[worker] = connection
            return {"begun": self._begun, "number": self._numbers.get(worker, 0)}

    def _answer(self, worker: str, model: Header, connection: Connection, buffer: list[Tensor]) -> None:
        """Serve a request."""
        request = json.loads(connection.recv_bytes())
        if request["number"]:
            _receive_into(connection, buffer)
        with self._lock:
            # A worker that has joined again knows what was applied: earlier messages must be refused.
            if self._ended or self._connections.get(worker) is not connection or model != self._model:
                raise EOFError("it has joined again, or the centre ends")
            if request["number"] > self._numbers.get(worker, 0):
                self._numbers[worker] = request["number"]
                if request["begins"]:
                    if not self._begun:
                        copy_all(self._weights, buffer)
                        self._begun = True
                elif all(bool(vector.isfinite().all()) for vector in buffer):
                    self._apply(buffer, *request["settings"])
                else:
                    print(f"! {worker} brought numbers that are not finite; they are left out", flush=True)
            if request["reads"]:
                copy_all(buffer, self._weights)
            answer = {"version": self.version}
        _send(connection, answer, buffer if request["reads"] else ())

    def _apply(self, message: list[Tensor], lr: float, momentum: float, delay: int) -> None:
        delay = delay or self._workers or len(self._connections)
        rule, kept = DelayedNesterovRule([], lr, momentum, delay), iter(self._kept)
        rule.open(self._weights, [self._slot], lambda *_: next(kept))
        rule.apply(Push(0, tuple(self._weights), tuple(message), None))
        self.version += 1

    def _lay_out(self, model: Header) -> None:
        self._model, shapes = model, model["vectors"]
        self._weights = [torch.zeros(length, dtype=getattr(torch, dtype)) for length, dtype in shapes]
        self._slot = Slot(0, tuple(slice(0, len(vector)) for vector in self._weights))
        # As the rule keeps them: sums, velocities, and the number of messages in the sum.
        self._kept = [torch.zeros_like(one) for one in 2 * self._weights]
        self._kept.append(torch.zeros(1, dtype=torch.int64))

    def save(self, last: bool = False) -> None:
        """Write the state if it has changed; after the `last` call no message is applied."""
        with self._lock:
            self._ended, version = last, self.version
            if not self._begun or version == self._saved:
                return
            vectors = enumerate([*self._weights, *self._kept])
            copies = {f"{number:03}": vector.clone() for number, vector in vectors}
            head = json.dumps({"model": self._model, "version": version, "numbers": self._numbers})
        replace_file(self._keep, safetensors.torch.save(copies, metadata={"centre": head}))
        self._saved = version

    def _load(self) -> None:
        try:
            with safe_open(self._keep, framework="pt") as file:
                head = json.loads(file.metadata()["centre"])
                self._lay_out(head["model"])
                copy_all([*self._weights, *self._kept], map(file.get_tensor, sorted(file.keys())))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise BadCheckpoint(
                f"{self._keep} is damaged, or not what 'tutti centre' writes ({error}); name another file "
                "with --keep to begin a new centre"
            ) from error
        self.version, self._numbers, self._begun = head["version"], head["numbers"], True


def read_key(file: str) -> bytes:
    """Return the key in a file, by default TUTTI_CENTRE_KEY; refuse by BadOption one that can be guessed."""
    try:
        key = (Path(file).read_text() if file else os.environ.get("TUTTI_CENTRE_KEY", "")).strip()
    except (OSError, ValueError) as error:
        raise BadOption(f"cannot read the key of the centre in {file}: {error}") from error
    if len(key) < 16:
        raise BadOption(
            "a centre and its workers need a key of at least 16 characters, the same on all; make one with "
            "'openssl rand -hex 32 > key.txt', and give the file, or set TUTTI_CENTRE_KEY"
        )
    return key.encode()


def _join(address: str, key: bytes, worker: Header) -> tuple[Connection, Header]:
    """Connect to a centre and join; return the connection and the answer."""
    connection = _connection_of(socket.create_connection(_address_of(address), UNREACHABLE_S))
    try:
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        _send(connection, worker)
        answer = json.loads(connection.recv_bytes())
        if "refused" in answer:
            raise BadModel(answer["refused"])
    except Exception as error:
        connection.close()
        if isinstance(error, AuthenticationError | AssertionError):
            raise BadOption(f"the centre at {address} has another key; give both the same") from error
        raise
    return connection, answer


def _address_of(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise BadOption(f"'{text}' is no address of a centre; give HOST:PORT, such as 10.0.0.1:7070")
    return host.strip("[]"), int(port)


def _connection_of(end: socket.socket) -> Connection:
    """Make a connection of a socket; reading and writing raise one of `LOST`."""
    end.setblocking(True)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", SILENCE_S, 0))
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SILENCE_S, 0))
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, UNREACHABLE_S)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * UNREACHABLE_S)
    return Connection(end.detach())


def _send(connection: Connection, header: Header, vectors: Vectors = ()) -> int:
    """Send a header and vectors; return the bytes of the vectors."""
    connection.send_bytes(json.dumps(header).encode())
    for vector in vectors:
        connection.send_bytes(vector.view(torch.uint8).numpy().data)
    return sum(vector.nbytes for vector in vectors)


def _receive_into(connection: Connection, vectors: Vectors) -> None:
    for vector in vectors:
        connection.recv_bytes_into(vector.view(torch.uint8).numpy().data)
