"""Messages from ranks under mpirun to the process that ran mpirun, when both are on one host.

Two anonymous files of that process, which the ranks open through /proc: one with what they are to do, one to
which they append messages. Nothing has a name that could be left behind. A rank on another host cannot reach
them: the files with these numbers there do not exist, or begin with another token.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tutti.comm.shm import memfd
from tutti.comm.shm.memfd import FileAddress
from tutti.launch.exit_reports import decode, encode

TOKEN_BYTES: Final = 16


@dataclass(frozen=True)
class RankStarted:
    """The message of a rank that has started.

    Attributes:
        rank: which one.
        segments: the files in /dev/shm that the MPI library made for it, to be removed if the job is killed.
    """

    rank: int
    segments: tuple[str, ...]


@dataclass(frozen=True)
class Address:
    """The process that ran mpirun and its files, as its ranks see them.

    Attributes:
        process: its number.
        payload: its descriptor of the file with what the ranks are handed.
        messages: its descriptor of the file that they append to.
        token: what the payload begins with, in hexadecimal digits.
    """

    process: int
    payload: int
    messages: int
    token: str

    def is_here(self) -> bool:
        """Tell whether that process is on this host, and lives."""
        return self._read(TOKEN_BYTES) is not None

    def payload_here(self) -> bytes | None:
        """Return the payload; None on another host."""
        content = self._read()
        return None if content is None else content[TOKEN_BYTES:]

    def _read(self, count: int = -1) -> bytes | None:
        """Read the first bytes of the payload's file, which begins with the token; None on another host."""
        try:
            with os.fdopen(FileAddress(self.process, self.payload).open(), "rb") as file:
                content = file.read(count)
        except (OSError, ValueError):
            return None
        return content if content[:TOKEN_BYTES].hex() == self.token else None

    def send(self, message: object) -> bool:
        """Append a message; returns whether that was possible, which it is not on another host."""
        if not self.is_here():
            return False
        try:
            target = FileAddress(self.process, self.messages).open(os.O_APPEND)
        except (OSError, ValueError):
            return False
        data = encode(message)
        try:
            # One write with O_APPEND: the kernel appends it as a whole, even if other ranks write meanwhile.
            return os.write(target, data) == len(data)
        finally:
            os.close(target)


class MpirunChannel:
    """The side of the process that runs mpirun.

    Args:
        payload: what the ranks are to be handed.
    """

    def __init__(self, payload: bytes) -> None:
        self._token = os.urandom(TOKEN_BYTES)
        self._payload, self._messages = self._file_of(payload), memfd.make("messages")
        self.address = Address(os.getpid(), self._payload, self._messages, self._token.hex())

    def _file_of(self, payload: bytes) -> int:
        made = memfd.make("payload")
        with open(made, "wb", closefd=False) as file:
            file.write(self._token + payload)
        return made

    def messages(self) -> list[object]:
        """Return all messages that have come so far."""
        return decode(Path(f"/proc/self/fd/{self._messages}").read_bytes())

    def close(self) -> None:
        """Close the files, which ends them."""
        os.close(self._payload)
        os.close(self._messages)
