"""A centre that is a process of its own: workers come to it over TCP, and go, at any time.

    worker a   join ─ weights ─ exchange ────── exchange ✝           join ─ exchange ...
    worker b            join ──── exchange ────────── exchange ───── exchange ...
    centre              c0 ─────── c1 ── c2 ────── c3 ─── c4 ── file ── c5 ── c6 ...

A thread serves each connection: it receives without the lock, and moves the weights under it, so that a slow
or stopped worker delays nobody.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from itertools import zip_longest
from multiprocessing import AuthenticationError
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Final

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tutti.errors import BadCheckpoint, BadOption
from tutti.parameter_server.base import Push, Vectors
from tutti.parameter_server.rules import BUFFERED, DelayedNesterovRule
from tutti.parameter_server.wire import LOST, SILENCE_S, Link, address_of
from tutti.records.files import replace_file
from tutti.replica import ReplicaMemory, copy_all, flatten
from tutti.state import ORDERS, Named, fill_all, joined, pieces_of_all

WEIGHTS: Final = "weights"
"""The first word of the names of the weights in the file."""

HEAD: Final = "centre"
"""The entry of the file's metadata with all that is no tensor."""


class RemoteServer:
    """The weights of a centre, the rule of `AsyncDiLoCo`, and the connections of its workers.

    Args:
        key: the one that workers must have.
        keep: the file of its state. If it is there, the centre goes on from it; else the first worker that
            joins gives the weights.
        workers: N of the rule where its workers leave it open; 0: the number that are connected.

    Raises:
        BadCheckpoint: the file is damaged, or another one.
    """

    def __init__(self, key: bytes, keep: Path, workers: int = 0) -> None:
        self._key, self._keep, self._workers = key, keep, workers
        self._lock = Lock()
        self._listener: socket.socket | None = None
        self._links: dict[str, Link] = {}
        # The number of each worker's last message.
        self._numbers: dict[str, int] = {}
        self._model: list[list[Any]] = []
        self._begun, self._version, self._saved = False, 0, -1
        if keep.exists():
            self._load()

    @property
    def version(self) -> int:
        """The number of messages applied."""
        return self._version

    def listen(self, address: str) -> str:
        """Serve workers from now on, in threads; return the address, with the port chosen if it was 0.

        Raises:
            BadOption: nothing can listen there.
        """
        host, port = address_of(address)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._listener = listener = socket.create_server((host, port), family=family)
        except OSError as error:
            raise BadOption(
                f"cannot listen at {address}: {error.strerror}; give an address of this host"
            ) from error
        Thread(target=self._accept, args=(listener,), name="centre-accept", daemon=True).start()
        return f"{host}:{listener.getsockname()[1]}"

    def close(self) -> None:
        """Serve nobody any more: nothing that comes from now on is applied."""
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            for link in self._links.values():
                link.shut()
            self._links = {}

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                end, (host, *_) = listener.accept()
            except OSError:
                listener.close()
                return
            Thread(target=self._serve, args=(end, host), name="centre-worker", daemon=True).start()

    @torch.no_grad()
    def _serve(self, end: socket.socket, host: str) -> None:
        """Serve a worker until its connection ends."""
        link, worker = Link(end), ""
        try:
            link.limit(SILENCE_S)
            link.authenticate(self._key, listens=True)
            join = link.receive()
            worker = join["worker"]
            buffer = self._admit(worker, join["model"], link)
            link.limit(0)
            while True:
                self._answer(worker, join["model"], link, buffer)
        except (*LOST, AuthenticationError) as error:
            why = str(error) or "it has left"
        finally:
            with self._lock:
                if self._links.get(worker) is link:
                    del self._links[worker]
                left = len(self._links)
            link.close()
        print(f"- {worker or 'nobody'} at {host}: {why}; {left} connected", flush=True)

    def _admit(self, worker: str, model: list[list[Any]], link: Link) -> list[Tensor]:
        """Let a worker join, or refuse it; return memory for its messages."""
        with self._lock:
            if self._begun and model != self._model:
                link.send({"refused": _difference(self._model, model)})
                raise EOFError("it has another model")
            if not self._begun:
                self._lay_out(model)
            before = self._links.get(worker)
            if before is not None:
                before.shut()
            self._links[worker] = link
            answer = {"begun": self._begun, "number": self._numbers.get(worker, 0)}
            connected = len(self._links)
        link.send(answer)
        print(f"+ {worker}: {connected} connected", flush=True)
        return [torch.zeros_like(weights) for weights in self._weights]

    def _answer(self, worker: str, model: list[list[Any]], link: Link, buffer: list[Tensor]) -> None:
        """Serve a request."""
        request = link.receive()
        begins, number = "begins" in request, request.get("number", 0)
        if begins or number:
            link.receive_into(buffer)
        with self._lock:
            # A worker that has joined again knows what was applied, so nothing that came before may be.
            if self._links.get(worker) is not link or model != self._model:
                raise EOFError("it has joined again")
            if begins and not self._begun:
                copy_all(self._weights, buffer)
                self._begun = True
            elif number > self._numbers.get(worker, 0):
                self._apply(buffer, request["settings"])
                self._numbers[worker] = number
            if request["reads"]:
                copy_all(buffer, self._weights)
            answer = {"version": self._version}
        link.send(answer, buffer if request["reads"] else ())

    def _apply(self, message: Vectors, settings: Sequence[float]) -> None:
        lr, momentum, delay = settings
        self._rule.use([lr, momentum, delay or self._workers or len(self._links)])
        self._rule.apply(Push(0, self._slot.views(self._weights), self._slot.views(message), None))
        self._version += 1

    def _lay_out(self, model: list[list[Any]]) -> None:
        """Lay out the vectors as the workers do."""
        of_dtypes: dict[torch.dtype, list[tuple[str, nn.Parameter]]] = {}
        for name, shape, dtype, order in model:
            like = torch.zeros(shape, dtype=getattr(torch, dtype)).contiguous(memory_format=ORDERS[order])
            of_dtypes.setdefault(like.dtype, []).append((name, nn.Parameter(like)))
        self._model = model
        self._flats = [flatten(named, dtype, ReplicaMemory()) for dtype, named in of_dtypes.items()]
        self._weights = [flat.weights for flat in self._flats]
        self._rule = DelayedNesterovRule(self._flats, lr=0.0, momentum=0.0, delay=1)
        [self._slot] = self._rule.cut(self._flats, 1)
        self._rule.open(self._weights, [self._slot], lambda length, dtype: torch.zeros(length, dtype=dtype))

    @torch.no_grad()
    def save(self) -> bool:
        """Write the state if it has changed; return whether it had.

        Raises:
            OSError: it cannot be written.
        """
        with self._lock:
            if not self._begun or self._version == self._saved:
                return False
            kept, version = self._rule.state(self._slot.number), self._version
            pieces = [*pieces_of_all(WEIGHTS, self._flats, self._weights), *kept.pieces]
            copies = {
                name: tensor.clone(memory_format=torch.contiguous_format)
                for name, tensor in joined(pieces).items()
            }
            head = {"model": self._model, "version": version, "numbers": self._numbers, **kept.numbers}
            text = json.dumps(head)
        replace_file(self._keep, safetensors.torch.save(copies, metadata={HEAD: text}))
        self._saved = version
        return True

    @torch.no_grad()
    def _load(self) -> None:
        try:
            with safe_open(self._keep, framework="pt") as file:
                head = json.loads(file.metadata()[HEAD])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self._lay_out(head["model"])
            fill_all(tensors, WEIGHTS, self._flats, self._weights)
            self._rule.load_state(Named(tensors, {BUFFERED: head[BUFFERED]}))
            self._version, self._numbers = head["version"], head["numbers"]
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, BadCheckpoint) as error:
            raise BadCheckpoint(
                f"{self._keep} is damaged, or not what 'tutti centre' writes ({error}); name another file "
                "with --keep to begin a new centre"
            ) from error
        self._begun = True


def _difference(here: list[list[Any]], there: list[list[Any]]) -> str:
    own, other = next(pair for pair in zip_longest(here, there) if pair[0] != pair[1])
    return (
        f"the model differs from the centre's, which has {_words(own)} where this one has {_words(other)}; "
        "train the same architecture and layout, or begin a new centre with another --keep"
    )


def _words(parameter: list[Any] | None) -> str:
    if parameter is None:
        return "nothing"
    name, shape, dtype, order = parameter
    return f"'{name}' {tuple(shape)} of {dtype} in {order}"
