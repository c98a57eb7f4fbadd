"""The memory of attributes: which of them lie in the same, as views do, and things that lie in it again.

A block is a stretch of memory in which several things lie. It is kept as its bytes, and a thing as its place
in them, in bytes as well:

self.table = torch.zeros(4, 3)      {"shape": [4, 3], "strides": [12, 4], "offset": 0, "dtype": ..., ...}
self.row = self.table[1]            {"shape": [3], "strides": [4], "offset": 12, "dtype": ..., ...}
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property
from typing import Any, Final, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from tutti.state import Values

Thing: TypeAlias = Tensor | np.ndarray[Any, Any]
"""What lies in memory."""

Stretch: TypeAlias = tuple[int, int]
"""Where something begins in memory, and where it ends."""

THINGS: Final = (Tensor, np.ndarray)

_OF_NUMPY: Final = "numpy"
"""What an array has in the place of a type of device."""


def extent(thing: Thing) -> Stretch:
    """Return where the elements of a tensor or an array lie; (0, 0): in no memory.

    A DTensor has none but its part's.
    """
    own: Thing = getattr(thing, "_local_tensor", thing)
    if isinstance(own, Tensor):
        if own.layout is not torch.strided or not own.numel():
            return 0, 0
    elif not own.size:
        return 0, 0
    first = _first(own)
    reaches = [(size - 1) * stride for size, stride in zip(own.shape, _strides(own), strict=True)]
    ends = sum(min(reach, 0) for reach in reaches), sum(max(reach, 0) for reach in reaches)
    return (first + ends[0], first + ends[1] + own.itemsize) if first else (0, 0)


def _first(thing: Thing) -> int:
    """Return where the first element lies."""
    return thing.data_ptr() if isinstance(thing, Tensor) else thing.ctypes.data


def _strides(thing: Thing) -> list[int]:
    """Return the strides in bytes."""
    if isinstance(thing, Tensor):
        return [stride * thing.itemsize for stride in thing.stride()]
    return list(thing.strides)


class Stretches:
    """Stretches of memory; those that overlap are one."""

    def __init__(self, stretches: Iterable[Stretch]) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        for begin, end in sorted(stretches):
            if self._ends and begin < self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            elif begin < end:
                self._begins.append(begin)
                self._ends.append(end)

    def add(self, stretch: Stretch) -> None:
        """Add another one, which is one with those that it overlaps."""
        begin, end = stretch
        if begin >= end:
            return
        first, behind = bisect_right(self._ends, begin), bisect_left(self._begins, end)
        if first < behind:
            begin, end = min(begin, self._begins[first]), max(end, self._ends[behind - 1])
        self._begins[first:behind] = [begin]
        self._ends[first:behind] = [end]

    def around(self, thing: Thing) -> Stretch | None:
        """Return the first stretch that a thing has a part in."""
        begin, end = extent(thing)
        at = bisect_right(self._ends, begin)
        found = at < len(self._begins) and self._begins[at] < end
        return (self._begins[at], self._ends[at]) if found else None


def memory_of(tensors: Iterable[Tensor]) -> Stretches:
    """Return the memory of tensors, with what of it lies between their elements."""
    own = (getattr(tensor, "_local_tensor", tensor) for tensor in tensors)
    storages = (one.untyped_storage() for one in own if one.layout is torch.strided)
    return Stretches((one.data_ptr(), one.data_ptr() + one.nbytes()) for one in storages)


class Blocks:
    """The blocks that several things lie in."""

    def __init__(self) -> None:
        self._things: list[Thing] = []
        self._numbers: dict[Stretch, int] = {}

    def add(self, thing: Thing) -> None:
        """Add a thing, before any place is asked for."""
        if isinstance(thing, Tensor) or (_root(thing).flags.writeable and not thing.dtype.hasobject):
            self._things.append(thing)

    def __contains__(self, thing: Thing) -> bool:
        """Tell whether a thing that was added lies in a block."""
        return id(thing) in self._found

    def values(self, thing: Thing) -> list[Any] | None:
        """Return the number of a thing's block, the block when it is first met, and the place in it.

        None: it cannot be put there again.
        """
        block, things = self._found[id(thing)]
        place, memory = place_in(thing, block[0]), live_bytes(things, block)
        if place is None or memory is None:
            return None
        known = block in self._numbers
        number = self._numbers.setdefault(block, len(self._numbers))
        return [number, None if known else memory, place]

    @cached_property
    def _found(self) -> dict[int, tuple[Stretch, list[Thing]]]:
        """The blocks, and what lies in them, by the identity of the things."""
        stretches, found = Stretches(map(extent, self._things)), defaultdict(list)
        for thing in self._things:
            found[stretches.around(thing)].append(thing)
        return {
            id(thing): (block, things)
            for block, things in found.items()
            if block and len(things) > 1
            for thing in things
        }


def place_in(thing: Any, begin: int) -> Values | None:
    """Return where a thing lies in the block that begins there; None: no view can be made of that."""
    if type(thing) in (Tensor, nn.Parameter):
        plain = thing.layout is torch.strided and not (
            thing.is_quantized or thing.is_conj() or thing.is_neg()
        )
        kind, dtype, writeable = thing.device.type, str(thing.dtype).removeprefix("torch."), True
    elif type(thing) is np.ndarray:
        plain = np.dtype(thing.dtype.str) == thing.dtype
        kind, dtype, writeable = _OF_NUMPY, thing.dtype.str, thing.flags.writeable
    else:
        return None
    offset = _first(thing) - begin if plain else 0
    if not plain or (kind != _OF_NUMPY and offset % thing.itemsize):
        return None
    shape, strides = list(thing.shape), _strides(thing)
    where = {"shape": shape, "strides": strides, "offset": offset}
    return {**where, "kind": kind, "dtype": dtype, "writeable": writeable}


def thing_in(block: Tensor, place: Values) -> Thing:
    """Return a new thing that lies in a block."""
    shape, strides, offset = place["shape"], place["strides"], place["offset"]
    if place["kind"] == _OF_NUMPY:
        made = np.ndarray(shape, place["dtype"], block.numpy(), offset, strides)
        made.flags.writeable = place["writeable"]
        return made
    found = torch.empty(0, dtype=getattr(torch, place["dtype"]), device=block.device)
    first, *steps = [of_bytes // found.itemsize for of_bytes in (block.storage_offset() + offset, *strides)]
    return found.set_(block.untyped_storage(), first, shape, steps)


def live_bytes(things: Iterable[Thing], stretch: Stretch) -> Tensor | None:
    """Return the bytes of a stretch of memory, by way of a thing in it whose memory has all of it."""
    begin, end = stretch
    for tensor in [found for thing in things if (found := _backing(thing)) is not None]:
        storage, size = tensor.untyped_storage(), tensor.itemsize
        first = begin - storage.data_ptr()
        whole = first >= 0 and end <= storage.data_ptr() + storage.nbytes()
        if whole and first % size == (end - begin) % size == 0:
            # A view has the version of the tensor, which tells whether it was written to.
            return tensor.as_strided(((end - begin) // size,), (1,), first // size).view(torch.uint8)
    return None


def _backing(thing: Thing) -> Tensor | None:
    """Return a tensor that has all of the memory that a thing is a view of, or lies in it."""
    if isinstance(thing, np.ndarray):
        root = _root(thing)
        base: Any = root.base
        if not isinstance(base, Tensor):
            try:
                return torch.from_numpy(root)
            except (TypeError, ValueError):  # of texts, say
                return None
        thing = base
    return None if place_in(thing, 0) is None else thing.detach()


def _root(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the array that an array is a view of, maybe by way of others."""
    root = array
    base: Any = array.base
    while base is not None and not isinstance(base, Tensor):
        root = base if isinstance(base, np.ndarray) else root
        base = getattr(base, "base", None)
    return root
