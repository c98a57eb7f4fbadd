"""Memory in which the state of a run outlives its ranks: the process that starts them has made it. No torch.

    page      wishes │ folder │ description of copy 1, of copy 2
    copy 1    all files of a checkpoint, one after the other
    copy 2    likewise
    data      an arena with the data set, which need not be read again (`tutti.run.shared_data`)

The copies take turns, and a copy is described last, by a number that grows: a rank that dies while it copies
leaves the other one. No rank makes any of it larger, or writes to it by a call: a disk without room for more
does not touch it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from tutti.checkpoint.writer_process import Order, write_checkpoint
from tutti.comm.shm import memfd
from tutti.comm.shm.arena import Arena
from tutti.comm.shm.memfd import FileAddress
from tutti.records.checkpoints import present, step_folder, tidy
from tutti.records.json_lines import Record, parse_record, to_json

_SLOT: Final = 1 << 24
"""The room for a text on the page, in bytes, which takes memory only where it is written."""

_LENGTH: Final = 8
"""The size of the number before a text: its length, 0 if there is none."""

_WANTED: Final = 0
_FOLDER: Final = 1
_FILES: Final = 1


@dataclass(frozen=True)
class StateCopy(Record):
    """A copy of the state of all ranks; by default none."""

    number: int = 0  # of its memory, 1 or 2
    step: int = -1
    ranks: int = 0
    files: dict[str, tuple[int, int]] = field(default_factory=dict)  # offset and size of each
    taken: int = 0  # how many copies were taken, this one included


@dataclass(frozen=True)
class MemoryPlace:
    """The address of the memory."""

    page: FileAddress
    copies: tuple[FileAddress, FileAddress]
    data: FileAddress

    @property
    def last(self) -> StateCopy:
        """The copy that was taken last."""
        texts = filter(None, (self._read(_FILES + number) for number in (1, 2)))
        copies = [parse_record(text, StateCopy) for text in texts]
        return max(copies, key=lambda one: one.taken, default=StateCopy())

    def copy_wish(self) -> Callable[[], bool]:
        """Return a function that returns at once whether a copy is wanted now."""
        page = self.page.open()
        try:
            words = mmap.mmap(page, mmap.PAGESIZE, prot=mmap.PROT_READ)
        finally:
            os.close(page)
        return lambda: words[_WANTED] != 0

    @property
    def folder(self) -> Path | None:
        """The folder of the run; None: it has none, or it is unknown yet."""
        text = self._read(_FOLDER)
        return None if text is None else Path(os.fsdecode(text))

    def note_folder(self, path: Path) -> None:
        """Keep the folder of the run."""
        self._write(_FOLDER, os.fsencode(path))

    def publish(self, copy: StateCopy) -> None:
        """Make a copy the last one."""
        text = to_json(replace(copy, taken=self.last.taken + 1))
        self._write(_FILES + copy.number, text.encode())

    def write_last(self, folder: Path, keep: int) -> None:
        """Write the last copy as a checkpoint, unless the folder has one as late."""
        copy, there = self.last, present(folder)
        if not copy.number or (there and there[-1].name >= step_folder(folder, copy.step).name):
            return
        folder.mkdir(parents=True, exist_ok=True)
        process, descriptor = self.copies[copy.number - 1]
        memory = f"/proc/{process}/fd/{descriptor}"
        write_checkpoint(Order(memory, folder, "last", copy.files, copy.step, copy.ranks, keep))
        tidy(folder, copy.step, keep)

    def _write(self, slot: int, text: bytes) -> None:
        """Write a text; a process that is killed meanwhile leaves none."""
        page = self.page.open()
        try:
            # No limit on the size of files forbids to store in a mapping, unlike a write.
            mapped = mmap.mmap(page, _SLOT, offset=slot * _SLOT)
        finally:
            os.close(page)
        with mapped:
            mapped[:_LENGTH] = bytes(_LENGTH)
            mapped[_LENGTH : _LENGTH + len(text)] = text
            mapped[:_LENGTH] = len(text).to_bytes(_LENGTH, "little")

    def _read(self, slot: int) -> bytes | None:
        """Return a text; None: there is none."""
        page = self.page.open()
        try:
            length = int.from_bytes(os.pread(page, _LENGTH, slot * _SLOT), "little")
            return os.pread(page, length, slot * _SLOT + _LENGTH) if length else None
        finally:
            os.close(page)


class StateMemory:
    """The memory, in the process that has made it; ranks of this host find it by `place`."""

    def __init__(self) -> None:
        self._made = [memfd.make_roomy(what) for what in ("state-page", "state-1", "state-2")]
        page, *copies = map(FileAddress.of, self._made)
        self._data = Arena.create()
        self.place = MemoryPlace(page, (copies[0], copies[1]), self._data.address)

    def want_copy(self, wanted: bool) -> None:
        """Ask the ranks to copy their state as soon as they can, or withdraw the request."""
        os.pwrite(self._made[0], bytes([wanted]), _WANTED)

    def close(self) -> None:
        """Give it back."""
        for one in self._made:
            os.close(one)
        self._data.close()
