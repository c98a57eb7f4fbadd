"""How a rank under mpirun writes to the process that ran mpirun, when both are on one host.

Two anonymous files of that process, which the ranks open through /proc: one with what they are to do, one to
which they append letters. Nothing has a name that could be left behind. A rank on another host cannot reach
them, and knows by the token that it does not read some other process's file.
"""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass
from typing import Final

TOKEN_BYTES: Final = 16
_LENGTH = 8


@dataclass(frozen=True)
class Arrived:
    """A rank is there.

    Attributes:
        rank: which one.
        segments: the files in /dev/shm that the MPI library made for it, to be swept up if the job is killed.
    """

    rank: int
    segments: tuple[str, ...]


@dataclass(frozen=True)
class Address:
    """Where the process that ran mpirun and its files are, as its ranks see them."""

    process: int
    payload: str
    letters: str
    token: str

    def is_here(self) -> bool:
        """Whether that process is on this host, and lives."""
        try:
            with open(self.payload, "rb") as file:
                return file.read(TOKEN_BYTES).hex() == self.token
        except OSError:
            return False

    def payload_here(self) -> bytes | None:
        """The payload; None on another host."""
        try:
            with open(self.payload, "rb") as file:
                token, content = file.read(TOKEN_BYTES), file.read()
        except OSError:
            return None
        return content if token.hex() == self.token else None

    def send(self, letter: object) -> bool:
        """Append a letter; whether that was possible, which it is not on another host."""
        if not self.is_here():
            return False
        try:
            target = os.open(self.letters, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        except OSError:
            return False
        body = pickle.dumps(letter)
        try:
            # One write: the kernel appends it as a whole, whoever else writes.
            written = os.write(target, len(body).to_bytes(_LENGTH, "little") + body)
        finally:
            os.close(target)
        return written == len(body) + _LENGTH


class Letterbox:
    """The side of the process that runs mpirun.

    Args:
        payload: what the ranks are to be handed.
    """

    def __init__(self, payload: bytes) -> None:
        token = os.urandom(TOKEN_BYTES)
        self._payload = os.memfd_create("tutti-payload", os.MFD_CLOEXEC)
        self._letters = os.memfd_create("tutti-letters", os.MFD_CLOEXEC)
        with open(self._payload, "wb", closefd=False) as file:
            file.write(token + payload)
        files = f"/proc/{os.getpid()}/fd"
        self.address = Address(
            os.getpid(), f"{files}/{self._payload}", f"{files}/{self._letters}", token.hex()
        )

    def letters(self) -> list[object]:
        """All letters that have come so far."""
        with open(self.address.letters, "rb") as file:
            data = file.read()
        found: list[object] = []
        while len(data) >= _LENGTH:
            end = _LENGTH + int.from_bytes(data[:_LENGTH], "little")
            if len(data) < end:
                break
            found.append(pickle.loads(data[_LENGTH:end]))
            data = data[end:]
        return found

    def close(self) -> None:
        """The files are gone."""
        os.close(self._payload)
        os.close(self._letters)
