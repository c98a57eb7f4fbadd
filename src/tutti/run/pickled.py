"""A pickled object. Its large arrays lie in an anonymous file, which the processes of the host map. No torch.

caller   writes the file    │ array │ array │ ... │
rank     maps it privately: the arrays of its copy are views of the mapping, and its writes stay private
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from typing_extensions import Buffer

from tutti.comm.shm import memfd
from tutti.comm.shm.memfd import FileAddress

LARGE: Final = 1 << 20
"""Bytes from which an array, or the rest of an object, lies in the file."""

_ALIGNMENT: Final = 64

_mapped: Final = weakref.WeakKeyDictionary[mmap.mmap, FileAddress]()
"""The mappings of this process that are in use, and their files."""


@dataclass(frozen=True)
class Pickled:
    """A pickled object. Its maker keeps the file open while it uses the object."""

    content: bytes  # the pickle; empty: it is the last of the large parts
    held: FileAddress | bytearray | None = None  # the file of the large parts, or their bytes
    lengths: tuple[int, ...] = ()  # of the large parts, in bytes

    @classmethod
    def of(cls, value: object, pickler: Callable[..., pickle.Pickler] = pickle.Pickler) -> Pickled:
        """Pickle an object."""
        large: list[memoryview] = []

        def stays(buffer: pickle.PickleBuffer) -> bool:
            memory = buffer.raw()
            if memory.nbytes >= LARGE:
                large.append(memory)
            return memory.nbytes < LARGE

        file = io.BytesIO()
        pickler(file, pickle.HIGHEST_PROTOCOL, buffer_callback=stays).dump(value)
        content = file.getvalue()
        if len(content) >= LARGE:
            large.append(memoryview(content))
            content = b""
        if not large:
            return cls(content)
        descriptor = _written(large)
        made = cls(content, FileAddress.of(descriptor), tuple(part.nbytes for part in large))
        weakref.finalize(made, os.close, descriptor)
        return made

    def load(self) -> Any:
        """Return the object, whose large arrays are views of a mapping of the file."""
        memory = self._memory()
        parts: list[Buffer] = [memory[start:end] for start, end in _spans(self.lengths)]
        content = self.content or parts.pop()
        return pickle.loads(content, buffers=parts)

    @property
    def is_own(self) -> bool:
        """True if this process has made the file."""
        return isinstance(self.held, FileAddress) and self.held.process == os.getpid()

    def in_band(self) -> Pickled:
        """Return the same with all its bytes, for other hosts."""
        return self if self.held is None else replace(self, held=bytearray(self._memory()))

    def free(self) -> None:
        """Free the file's memory, unless the object is in use here; it cannot be loaded afterwards."""
        if isinstance(self.held, FileAddress) and self.held not in _mapped.values():
            file = self.held.open()
            os.ftruncate(file, 0)
            os.close(file)

    def _memory(self) -> memoryview:
        if not isinstance(self.held, FileAddress):
            return memoryview(self.held or b"")
        file = self.held.open()
        try:
            size = _spans(self.lengths)[-1][1]
            mapping = mmap.mmap(file, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            os.close(file)
        _mapped[mapping] = self.held
        return memoryview(mapping)


def _written(parts: Sequence[memoryview]) -> int:
    """Return the descriptor of a new file with these parts."""
    descriptor = memfd.make("objects")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            for part, (start, _) in zip(parts, _spans([part.nbytes for part in parts]), strict=True):
                file.seek(start)
                file.write(part)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _spans(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Return the places of the parts in the file."""
    spans, start = [], 0
    for length in lengths:
        spans.append((start, start + length))
        start += -(-length // _ALIGNMENT) * _ALIGNMENT
    return spans
