"""Connections by which the launching process sees that ranks of other hosts live, and they that it does.

    launching process ──┬── rank 0      A rank that ends closes its connection, whatever it ends by. A host
                        ├── rank 1      without power or network closes none: the
                        └── rank 2      kernels ask each other every second.

MPI's own launcher sees that after minutes, may call it a success, and may blame a rank that failed as a
consequence. After the greeting a rank gives a sign each second, and sends a letter at its end; its witness
says by what it has ended. The launching process asks for the stacks of a rank that hangs.
Both sides prove in the greeting that they know the secret of the run:

    launching process ── nonce S ──► rank
                      ◄── nonce R, number of the rank, HMAC(secret, "rank", S, R, number) ──
                      ── HMAC(secret, "launcher", R, S) ──►

Needs no torch.
"""

from __future__ import annotations

import errno
import hmac
import os
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Final, cast

QUICK_S: Final = 3
"""Seconds of silence after which a host is lost, where the run goes on without it."""

PATIENT_S: Final = 30
"""The same where the run ends with it: a switch that starts again is silent for so long."""

DONE: Final = b"D"
"""The letter of a rank that is done, or ends as it has lost another one."""

FAILED: Final = b"F"
"""The letter of a rank that has failed, and has reported it: others end in consequence."""

SIGN_S: Final = 1.0
"""Time between two signs of a rank."""

_SIGN: Final = b"S"
_SIGN_BODY: Final = struct.Struct("<q?")
_ENDED: Final = b"E"
_ENDED_BODY: Final = struct.Struct("<i")
_BODIES: Final = {_SIGN: _SIGN_BODY, _ENDED: _ENDED_BODY}
_ASK: Final = b"?"
_NONCE: Final = 32
_NUMBER: Final = 4
_ANSWER: Final = _NONCE + _NUMBER + 32
_GREETING_S: Final = 10.0
_MOST_STRANGERS: Final = 64
_CONNECT_S: Final = 5.0


@dataclass(frozen=True)
class LivenessAddress:
    """The address of the launching process.

    Attributes:
        hosts: its IPv4 addresses, to be tried in this order.
        port: the port at each of them.
        secret: of the run, in hexadecimal digits.
        silence_s: the seconds of silence after which the other side is gone.
    """

    hosts: tuple[str, ...]
    port: int
    secret: str
    silence_s: int


@dataclass
class Sign:
    """The last sign of a rank.

    Attributes:
        beat: the number of its steps and 1, with `FIRST_STEP`; 0: it does something else than to train.
        waits: it has been waiting for other ranks for more than a moment.
        at: when it came, by the monotonic clock.
    """

    beat: int
    waits: bool
    at: float


@dataclass(frozen=True)
class RankEnd:
    """The end of a rank's connection.

    Attributes:
        rank: which one.
        at: when it was noticed, by the monotonic clock.
        silent: its host does not answer any more; else the rank has ended.
        letter: what the rank has said of its end; nothing if it was cut short.
        returncode: its exit code, or minus the signal that ended it; None: nobody has seen it.
    """

    rank: int
    at: float
    silent: bool
    letter: bytes
    returncode: int | None = None


@dataclass
class _Connection:
    """A connection that has come.

    Attributes:
        socket: its end here.
        nonce: what was sent.
        since: the time since when it is there.
        received: what has come, and is not a whole message yet.
        rank: the sender; None: it has not greeted yet.
        letter: what it has said of its end.
        returncode: what its witness has said of it.
    """

    socket: socket.socket
    nonce: bytes
    since: float
    received: bytearray = field(default_factory=bytearray)
    rank: int | None = None
    letter: bytes = b""
    returncode: int | None = None


class LivenessWatch:
    """The side of the launching process.

    Args:
        ranks: the number of ranks.
        silence_s: the seconds of silence after which a host is lost.
        elsewhere: some of them are on other machines.

    Attributes:
        address: for the ranks.
        seen: the ranks that have connected.
        ends: those whose connections have ended, in that order.
        signs: the last sign of each that has given one.
    """

    def __init__(self, ranks: int, silence_s: int, *, elsewhere: bool) -> None:
        self._ranks, self._silence_s = ranks, silence_s
        self._listener = socket.create_server(("" if elsewhere else "127.0.0.1", 0), backlog=max(128, ranks))
        self._listener.setblocking(False)
        self._secret = os.urandom(32)
        self._selector = selectors.EpollSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        hosts = own_addresses() if elsewhere else ("127.0.0.1",)
        port = int(self._listener.getsockname()[1])
        self.address = LivenessAddress(hosts, port, self._secret.hex(), silence_s)
        self.seen: set[int] = set()
        self.ends: list[RankEnd] = []
        self.signs: dict[int, Sign] = {}

    @property
    def complete(self) -> bool:
        """True if all ranks have connected."""
        return len(self.seen) == self._ranks

    @property
    def left(self) -> list[int]:
        """The ranks whose connections have not ended."""
        return sorted(self.seen - {end.rank for end in self.ends})

    def fileno(self) -> int:
        """A descriptor that is readable when there is something to look at."""
        return self._selector.fileno()

    def look(self) -> None:
        """Take what has come."""
        comes = False
        for key, _ in self._selector.select(0):
            if key.fileobj is self._listener:
                comes = True
            else:
                self._read(key.data)
        # Last, as it closes the connections of those who have not greeted by now.
        if comes:
            self._accept()

    def settle(self, seconds: float) -> None:
        """Wait, for a time, until the connections of all ranks have ended.

        Args:
            seconds: how long.
        """
        deadline = time.monotonic() + seconds
        while self.left and (rest := deadline - time.monotonic()) > 0:
            self._selector.select(rest)
            self.look()

    def close(self) -> None:
        """Close all connections, which ends the ranks."""
        if self._listener.fileno() < 0:
            return
        for key in list(self._selector.get_map().values()):
            if isinstance(key.data, _Connection):
                key.data.socket.close()
        self._listener.close()
        self._selector.close()

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except OSError:  # It has gone again.
            return
        connected.setblocking(False)
        one = _Connection(connected, os.urandom(_NONCE), time.monotonic())
        self._selector.register(connected, selectors.EVENT_READ, one)
        with suppress(OSError):
            connected.send(one.nonce)
        self._drop_strangers()

    def _drop_strangers(self) -> None:
        """Close the connections of those who do not greet."""
        strangers = [
            key.data
            for key in self._selector.get_map().values()
            if isinstance(key.data, _Connection) and key.data.rank is None
        ]
        late = [one for one in strangers if time.monotonic() - one.since > _GREETING_S]
        for one in late or strangers[: -(_MOST_STRANGERS + self._ranks)]:
            self._forget(one)

    def _read(self, one: _Connection) -> None:
        try:
            data = one.socket.recv(_ANSWER)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(one, silent=not isinstance(error, ConnectionError))
            return
        one.received += data
        if not data:
            self._end(one, silent=False)
        elif one.rank is not None:
            self._take(one, one.rank)
        elif len(one.received) >= _ANSWER:
            self._greet(one)

    def _take(self, one: _Connection, rank: int) -> None:
        """Take what a rank has sent: signs, and a letter; and what its witness has."""
        while one.received:
            letter = bytes(one.received[:1])
            body = _BODIES.get(letter)
            length = 1 + (0 if body is None else body.size)
            if len(one.received) < length:
                return
            if letter == _SIGN:
                beat, waits = _SIGN_BODY.unpack_from(one.received, 1)
                self.signs[rank] = Sign(beat, waits, time.monotonic())
            elif letter == _ENDED:
                (one.returncode,) = _ENDED_BODY.unpack_from(one.received, 1)
            else:
                one.letter = letter
            del one.received[:length]

    def ask_for_stacks(self, rank: int) -> None:
        """Have a rank that trains print the stacks of its threads."""
        for key in self._selector.get_map().values():
            if isinstance(key.data, _Connection) and key.data.rank == rank:
                with suppress(OSError):
                    key.data.socket.send(_ASK)

    def _greet(self, one: _Connection) -> None:
        theirs, number = bytes(one.received[:_NONCE]), bytes(one.received[_NONCE : _NONCE + _NUMBER])
        proof = bytes(one.received[_NONCE + _NUMBER : _ANSWER])
        rank = int.from_bytes(number, "little")
        expected = _proof(self._secret, b"rank", one.nonce, theirs, number)
        if not hmac.compare_digest(proof, expected) or rank >= self._ranks or rank in self.seen:
            self._forget(one)
            return
        one.rank = rank
        del one.received[:_ANSWER]
        self.seen.add(rank)
        ask_often(one.socket, self._silence_s)
        with suppress(OSError):
            one.socket.send(_proof(self._secret, b"launcher", theirs, one.nonce))
        self._take(one, rank)

    def _end(self, one: _Connection, silent: bool) -> None:
        if one.rank is not None:
            self.ends.append(RankEnd(one.rank, time.monotonic(), silent, one.letter, one.returncode))
        self._forget(one)

    def _forget(self, one: _Connection) -> None:
        self._selector.unregister(one.socket)
        one.socket.close()


class LivenessConnection:
    """The side of a rank.

    Args:
        connected: the socket, after the greeting.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket, self._leaves = connected, False
        self._lock, self._unsent = threading.Lock(), b""
        self._course: Callable[[], tuple[int, bool]] | None = None
        self._print_stacks: Callable[[], None] = lambda: None

    def leave(self, letter: bytes) -> None:
        """Say that this rank ends, and how."""
        with self._lock:
            self._leaves = True
            with suppress(OSError):
                self._socket.sendall(self._unsent + letter)

    def tell_end(self, returncode: int) -> None:
        """As the witness of the rank, say by what it has ended; it is gone, and says nothing more.

        The connection is over then, even if a process that the rank has forked lives on and has it open.
        """
        with suppress(OSError):
            self._socket.send(_ENDED + _ENDED_BODY.pack(returncode), socket.MSG_DONTWAIT)
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def give_signs(self, course: Callable[[], tuple[int, bool]], print_stacks: Callable[[], None]) -> None:
        """From now on, give signs.

        Args:
            course: tells the number of steps of this rank and 1, and whether it waits for others.
            print_stacks: called when the launching process asks for the stacks of its threads.
        """
        self._course, self._print_stacks = course, print_stacks

    def fileno(self) -> int:
        """The descriptor of the socket."""
        return self._socket.fileno()

    def close(self) -> None:
        """Close it."""
        self._socket.close()

    def end_when_lost(self, end: Callable[[], None]) -> None:
        """Call a function, in a thread, when the launching process is gone or cannot be reached any more."""
        threading.Thread(target=self._watch, args=(end,), name="tutti-liveness", daemon=True).start()

    def _watch(self, end: Callable[[], None]) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | select.POLLRDHUP)
        while True:
            if not poll.poll(SIGN_S * 1000):
                self._give_sign()
                continue
            if self._asked() != _ASK:
                break
            self._print_stacks()
        if not self._leaves:
            end()

    def _asked(self) -> bytes:
        """Receive the letter of what the launching process asks for; none if the connection is over."""
        try:
            return self._socket.recv(1)
        except OSError:
            return b""

    def _give_sign(self) -> None:
        with self._lock:
            if self._course is None or self._leaves:
                return
            # A link that is slow or cut has not taken the one before.
            data = self._unsent or _SIGN + _SIGN_BODY.pack(*self._course())
            with suppress(OSError):
                self._unsent = data[self._socket.send(data, socket.MSG_DONTWAIT) :]


def connect(address: LivenessAddress, rank: int) -> LivenessConnection | None:
    """Connect a rank to the launching process; None: it cannot be reached."""
    secret = bytes.fromhex(address.secret)
    for connected in _connected([(host, address.port) for host in address.hosts]):
        if _introduce(connected, secret, rank):
            ask_often(connected, address.silence_s)
            connected.settimeout(None)
            return LivenessConnection(connected)
        connected.close()
    return None


def _connected(places: Sequence[tuple[str, int]]) -> Iterator[socket.socket]:
    """Yield connections to the places, in the order in which they answer: some may be dead ends."""
    deadline = time.monotonic() + _CONNECT_S
    with selectors.DefaultSelector() as selector, ExitStack() as stack:
        for place in places:
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            if one.connect_ex(place) in (0, errno.EINPROGRESS):
                selector.register(one, selectors.EVENT_WRITE)
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                one = cast("socket.socket", key.fileobj)
                selector.unregister(one)
                if one.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    taken = one.dup()
                    taken.settimeout(_CONNECT_S)
                    yield taken


def _introduce(connected: socket.socket, secret: bytes, rank: int) -> bool:
    """Greet; tells whether it is the launching process that answers."""
    own, number = os.urandom(_NONCE), rank.to_bytes(_NUMBER, "little")
    try:
        theirs = _receive(connected, _NONCE)
        connected.sendall(own + number + _proof(secret, b"rank", theirs, own, number))
        return hmac.compare_digest(_receive(connected, 32), _proof(secret, b"launcher", own, theirs))
    except OSError:
        return False


def _receive(connected: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        data = connected.recv(count - len(received))
        if not data:
            raise ConnectionResetError
        received += data
    return received


def _proof(secret: bytes, *parts: bytes) -> bytes:
    return hmac.digest(secret, b"".join(parts), "sha256")


def ask_often(connected: socket.socket, silence_s: int) -> None:
    """Have the kernel ask the other side whether it is there, and end the connection after a silence."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, max(1, silence_s - 1))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, silence_s * 1000)


def own_addresses() -> tuple[str, ...]:
    """The IPv4 addresses of this machine; the last one is that for its own ranks."""
    import psutil  # It would slow every start.

    found = [
        one.address
        for addresses in psutil.net_if_addrs().values()
        for one in addresses
        if one.family == socket.AF_INET and not one.address.startswith("127.")
    ]
    return (*found, "127.0.0.1")


def first_lost(ends: Sequence[RankEnd]) -> list[int]:
    """The ranks that were lost first: all of silent hosts, else the one whose end nobody has reported.

    Args:
        ends: of connections, in their order. Ranks that end after the first one may do so as a consequence.
    """
    silent = [end.rank for end in ends if end.silent]
    first = next((end for end in ends if end.letter != DONE), None)
    return sorted(silent) or ([] if first is None or first.letter else [first.rank])
