"""A network between workers and a centre, whose connections can be lost in the middle of a message."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from threading import Event, Thread

TO_CENTRE, TO_WORKER = "to the centre", "to the worker"


class Network:
    """Passes on what both sides send, on one machine.

    Attributes:
        centre: where the centre listens.
        address: where it seems to listen.
        loses: the direction in which all is lost from now on.
        lost: set once something was.
        holds: the direction in which all of the first connection waits for `release`.
        down: whether new connections are refused.
    """

    def __init__(self, centre: str) -> None:
        self.centre, self.loses, self.holds, self.down = centre, "", "", False
        self.lost, self.released = Event(), Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self._ends: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[Thread] = []
        self._start(self._accept)

    def _start(self, run: Callable[..., None], *arguments: object) -> None:
        self._threads.append(Thread(target=run, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        while True:
            try:
                worker, _ = self._server.accept()
            except OSError:
                return
            host, _, port = self.centre.rpartition(":")
            if self.down:
                worker.close()
                continue
            centre = socket.create_connection((host, int(port)))
            self._ends.append((worker, centre))
            for source, sink, where in ((worker, centre, TO_CENTRE), (centre, worker, TO_WORKER)):
                self._start(self._pass_on, source, sink, where)

    def _pass_on(self, source: socket.socket, sink: socket.socket, where: str) -> None:
        loses = False
        with suppress(OSError):
            while data := source.recv(1 << 16):
                loses = loses or where == self.loses  # The rest of a message that has lost its beginning.
                if loses:
                    self.lost.set()
                    continue
                if where == self.holds:
                    self.lost.set()
                    self.released.wait()
                sink.sendall(data)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def cut(self, *, both: bool = True) -> None:
        """End all connections, of the centre only if `both`; on later ones nothing is lost."""
        self.loses = self.holds = ""
        for worker, centre in self._ends:
            for end in (worker, centre) if both else (worker,):
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def release(self) -> None:
        """Pass on what was held, and wait until the centre has ended those connections."""
        self.released.set()
        for thread in self._threads[1:3]:
            thread.join(60)
            assert not thread.is_alive()

    def close(self) -> None:
        """End it."""
        self.cut()
        self._server.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in (self._server, *chain(*self._ends)):
            end.close()
