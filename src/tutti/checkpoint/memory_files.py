"""Memory in which the state of a run outlives its ranks: the process that starts them has made it. No torch.

    page      wishes │ folder │ description of copy 1, of copy 2 │ takeover
    copy 1    all files of a checkpoint, one after the other
    copy 2    likewise
    data      an arena with the data set, which need not be read again

The copies take turns, and a copy is described last, by a number that grows: a rank that dies while it copies
leaves the other one. So does one of which a checksum does not hold, be it of the copy or of its description.
No rank makes any of it larger, or writes to it by a call: a disk without room for more does not touch it.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tutti.comm.shm import memfd
from tutti.comm.shm.arena import Arena
from tutti.comm.shm.memfd import FileAddress
from tutti.errors import BadRunFolder
from tutti.records.json_lines import Json

TABLE_BYTES: Final = 16
"""The beginning of the first allocation of the arena of the data."""

_SLOT: Final = 1 << 24
"""The room for a text on the page, in bytes, of which only what is written takes memory."""

_LENGTH: Final = 8
_DIGEST: Final = 16
_TEXT: Final = _LENGTH + _DIGEST
"""Where a text begins in its slot."""

_WANTED: Final = 0
_TOKEN: Final = 64
_TOKEN_BYTES: Final = 16
_FOLDER: Final = 1
_FILES: Final = 1
_TAKEOVER: Final = 4
_NUMBER: Final = "number"


@dataclass(frozen=True)
class MemoryPlace:
    """The address of the memory.

    Attributes:
        page: that of the page.
        copies: those of the two copies.
        data: that of the arena.
        token: what no other page has, in hexadecimal digits: on another host the address may be that of one.
    """

    page: FileAddress
    copies: tuple[FileAddress, FileAddress]
    data: FileAddress
    token: str

    def is_here(self) -> bool:
        """Tell whether the memory is on this host."""
        try:
            page = self.page.open()
        except (OSError, ValueError):
            return False
        try:
            return os.pread(page, _TOKEN_BYTES, _TOKEN).hex() == self.token
        finally:
            os.close(page)

    @property
    def whole(self) -> int:
        """The number of the copy that was taken last, 1 or 2; 0: there is none."""
        found = self.described()
        return found[0][0] if found else 0

    @property
    def copies_taken(self) -> int:
        """The number of copies that were taken."""
        return max((found[_NUMBER] for _, found in self.described()), default=0)

    @property
    def takeover(self) -> str | None:
        """Why ranks have come after others, the last time, in words; None: they have not."""
        try:
            text = self._read(_TAKEOVER)
        except _Damaged:
            return ""
        return None if text is None else text.decode()

    def note_takeover(self, why: str) -> None:
        """Note that ranks come after others."""
        self._write(_TAKEOVER, why.encode(errors="backslashreplace"))

    def copy_wish(self) -> Callable[[], bool]:
        """Return what tells at once whether a copy is wanted now."""
        page = self.page.open()
        try:
            words = mmap.mmap(page, mmap.PAGESIZE, prot=mmap.PROT_READ)
        finally:
            os.close(page)
        return lambda: words[_WANTED] != 0

    @property
    def folder(self) -> Path | None:
        """The folder of the run; None: it has none, or nobody knows it yet.

        Raises:
            BadRunFolder: it is gone, or another folder has taken its place, or nobody can tell which it is.
        """
        try:
            text = self._read(_FOLDER)
        except _Damaged:
            raise BadRunFolder(
                "the memory that has the name of the run's folder is damaged; go on by: --resume FOLDER"
            ) from None
        if text is None:
            return None
        before, _, name = text.partition(b" ")
        path = Path(os.fsdecode(name))
        now = _identity(path)
        if now != before:
            place = "" if now == b"0:0" else ", and another folder is in its place"
            raise BadRunFolder(
                f"cannot go on in {path}: it was removed or renamed while the run went on{place}; name a "
                "folder that stays with --out"
            )
        return path

    def note_folder(self, path: Path) -> None:
        """Keep the folder of the run."""
        self._write(_FOLDER, _identity(path) + b" " + os.fsencode(path))

    def described(self) -> list[tuple[int, Json]]:
        """The number and the description of each copy that was whole, the last one first."""
        return self._copies()[0]

    def damaged(self) -> list[int]:
        """The numbers of copies that nobody can find, as their descriptions are not what they were."""
        return self._copies()[1]

    def forget(self, number: int) -> None:
        """Have a copy be none any more."""
        with self._mapped(_FILES + number) as page:
            page[:_LENGTH] = bytes(_LENGTH)

    def publish(self, number: int, files: Json) -> None:
        """Make a copy the last one.

        Args:
            number: of the copy, 1 or 2.
            files: its description.
        """
        self._write(_FILES + number, json.dumps({**files, _NUMBER: self.copies_taken + 1}).encode())

    def _copies(self) -> tuple[list[tuple[int, Json]], list[int]]:
        found, damaged = [], []
        for number in (1, 2):
            try:
                text = self._read(_FILES + number)
            except _Damaged:
                damaged.append(number)
            else:
                found += [] if text is None else [(number, json.loads(text))]
        return sorted(found, key=lambda one: -one[1][_NUMBER]), damaged

    def _write(self, slot: int, text: bytes) -> None:
        """Write a text; a process that is killed meanwhile leaves none."""
        with self._mapped(slot) as page:
            page[:_LENGTH] = bytes(_LENGTH)
            page[_TEXT : _TEXT + len(text)] = text
            page[_LENGTH:_TEXT] = _digest(text)
            page[:_LENGTH] = len(text).to_bytes(_LENGTH, "little")

    def _mapped(self, slot: int) -> mmap.mmap:
        """A slot of the page to store in, which no limit on the size of files forbids, unlike a write."""
        page = self.page.open()
        try:
            return mmap.mmap(page, _SLOT, offset=slot * _SLOT)
        finally:
            os.close(page)

    def _read(self, slot: int) -> bytes | None:
        """Return a text; None: there is none.

        Raises:
            _Damaged: it is not what was written.
        """
        page = self.page.open()
        try:
            length = int.from_bytes(os.pread(page, _LENGTH, slot * _SLOT), "little")
            if length > _SLOT - _TEXT:
                raise _Damaged
            head = os.pread(page, _TEXT + length, slot * _SLOT)
        finally:
            os.close(page)
        if length and head[_LENGTH:_TEXT] != _digest(head[_TEXT:]):
            raise _Damaged
        return head[_TEXT:] if length else None


class _Damaged(Exception):
    """A text is not what was written."""


def _digest(text: bytes) -> bytes:
    return hashlib.blake2b(text, digest_size=_DIGEST).digest()


def _identity(path: Path) -> bytes:
    """The numbers of a folder's device and of its inode; zeros: there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return b"0:0"
    return b"%d:%d" % (found.st_dev, found.st_ino)


class StateMemory:
    """The memory, in the process that has made it; it is gone when that closes it or ends.

    Attributes:
        place: where ranks of this host find it.
    """

    def __init__(self) -> None:
        self._made = [memfd.make_roomy(what) for what in ("state-page", "state-1", "state-2")]
        page, *copies = map(FileAddress.of, self._made)
        self._data = Arena.create()
        self._data.allocate(TABLE_BYTES)
        token = os.urandom(_TOKEN_BYTES)
        os.pwrite(self._made[0], token, _TOKEN)
        self.place = MemoryPlace(page, (copies[0], copies[1]), self._data.address, token.hex())

    def want_copy(self, wanted: bool) -> None:
        """Have the ranks copy their state as soon as they can, or no more than they do by themselves."""
        os.pwrite(self._made[0], bytes([wanted]), _WANTED)

    def close(self) -> None:
        """Give it back."""
        for one in self._made:
            os.close(one)
        self._data.close()
