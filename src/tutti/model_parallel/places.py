"""The places of a rank's parts in the whole model: by them any layout goes on from the state of any other.

    tensor=2   rank 0   optimizer/0.weight/exp_avg, rows 0 to 11   ┐
               rank 1   optimizer/0.weight/exp_avg, rows 12 to 23  ┴─▶ optimizer/0.weight/exp_avg, 24 rows

What an optimizer keeps in the shape of a parameter is divided as the parameter is, and a counter is the same
everywhere. All else that it keeps for a part alone, such as the mean of a part's columns, says nothing about
the whole, and is the rank's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from math import prod
from typing import Any, Final

from torch import Tensor
from typing_extensions import override

from tutti.errors import BadCheckpoint
from tutti.optim.state import PREFIX
from tutti.state import Held, Named, TensorPiece, Values
from tutti.training.best_weights import EPOCHS

PORTION: Final = "portion"
"""The name under which a portion adds to a state what it must know of itself."""

APART: Final = "apart"
"""There, the names of tensors that each rank has for its parts alone, and nobody can put together."""

_IN_MEMORY: Final = {"rows": None, "channels_last": (0, 2, 3, 1), "channels_last_3d": (0, 2, 3, 4, 1)}
"""The dimensions in the order in which they lie in memory, the last one next to each other."""


@dataclass(frozen=True)
class PartPlace:
    """The place of a rank's part of a parameter in the whole one.

    Attributes:
        name: of the parameter in the whole model.
        shape: of the whole parameter.
        index: which elements the part has, along each dimension.
        saves: whether this rank saves the part. Otherwise another one has the same, and does.
    """

    name: str
    shape: tuple[int, ...]
    index: tuple[slice, ...]
    saves: bool = True

    @classmethod
    def whole(cls, name: str, tensor: Tensor, saves: bool = True) -> PartPlace:
        """Return the place of a parameter that is not divided."""
        return cls(name, tuple(tensor.shape), tuple(slice(0, size) for size in tensor.shape), saves)

    @classmethod
    def along(cls, name: str, part: Tensor, dim: int, length: int, start: int) -> PartPlace:
        """Return the place of a part that begins at `start` of a dimension, which is `length` long in all."""
        place = cls.whole(name, part)
        shape, index = list(place.shape), list(place.index)
        shape[dim], index[dim] = length, slice(start, start + part.shape[dim])
        return cls(name, tuple(shape), tuple(index))

    @cached_property
    def part(self) -> tuple[int, ...]:
        """The shape of the part."""
        return tuple(span.stop - span.start for span in self.index)

    @property
    def divided(self) -> bool:
        """True if the part is not all."""
        return self.part != self.shape

    def pieces(self, piece: TensorPiece) -> Iterator[TensorPiece]:
        """Yield a piece of the part as pieces of the whole, one for each stretch of memory."""
        if not self.divided or not prod(self.shape):
            yield replace(piece, shape=self.shape)
            return
        dims = _IN_MEMORY[piece.order] or range(len(self.shape))
        shape, part = ([sizes[dim] for dim in dims] for sizes in (self.shape, self.part))
        starts = [self.index[dim].start for dim in dims]
        strides = [*accumulate(reversed(shape[1:]), int.__mul__, initial=1)][::-1]
        # All behind this dimension is there as a whole, so that what it has is one stretch.
        last = max(dim for dim in range(len(shape)) if part[dim] != shape[dim])
        stretch = prod(part[last:])
        number = piece.start // stretch if stretch else 0
        at = piece.start
        while at < piece.stop:
            first, stop = starts[last] * strides[last], min(piece.stop, (number + 1) * stretch)
            rest = number
            for dim in reversed(range(last)):
                rest, row = divmod(rest, part[dim])
                first += (starts[dim] + row) * strides[dim]
            values = piece.values[at - piece.start : stop - piece.start]
            yield TensorPiece(piece.name, first + at - number * stretch, values, self.shape, piece.order)
            number, at = number + 1, stop


class PartPlaces:
    """The places of all parts that a rank has.

    Args:
        places: by the parameters' names in this rank's portion of the model.
    """

    def __init__(self, places: Mapping[str, PartPlace]) -> None:
        self._places = places
        self._names = {place.name: name for name, place in places.items()}

    def whole_name(self, name: str) -> str:
        """Return the name that a parameter has in the whole model."""
        return self._places[name].name

    def to_whole(self, held: Held) -> tuple[Held, Held]:
        """Return what is held for the parts: what of it is joint, and what is this rank's own."""
        joint, own = Held(), Held()
        for piece in held.pieces:
            name, place = self._in_whole(piece.name)
            counts = prod(piece.shape) == 1
            if place is None or not (counts or piece.shape == place.part or not place.divided):
                own.pieces.append(piece)
            if place is None and counts:
                joint.pieces.append(piece)
            elif place is not None and place.saves:
                renamed = replace(piece, name=name)
                if piece.shape == place.part:
                    joint.pieces += place.pieces(renamed)
                elif counts or not place.divided:
                    joint.pieces.append(renamed)
        for full, value in held.numbers.items():
            name, place = self._in_whole(full)
            joint.numbers[name] = value
            if place is None:
                own.numbers[full] = value
        return joint, own

    def to_portion(self, held: Named) -> Named:
        """Return this rank's parts of what all ranks hold; they are cut when they are looked up."""
        numbers = {self._in_portion(full)[0]: value for full, value in held.numbers.items()}
        return Named(_Parts(held.tensors, self._found(held.tensors)), numbers)

    def _found(self, tensors: Mapping[str, Tensor]) -> dict[str, tuple[str, PartPlace | None]]:
        found = {}
        for full in tensors:
            name, place = self._in_portion(full)
            if place is not None or not name_in(full)[1].strip("."):
                found[name] = full, place
        return found

    def _in_whole(self, full: str) -> tuple[str, PartPlace | None]:
        before, name, behind = name_in(full)
        place = self._places.get(name)
        return (full, None) if place is None else (before + place.name + behind, place)

    def _in_portion(self, full: str) -> tuple[str, PartPlace | None]:
        before, name, behind = name_in(full)
        own = self._names.get(name)
        return (full, None) if own is None else (before + own + behind, self._places[own])


class _Parts(Mapping[str, Tensor]):
    """A rank's parts of whole tensors.

    Args:
        tensors: the whole ones.
        found: by the name of the part, the name of the whole and the part's place in it; None: it is no
            tensor of a parameter.
    """

    def __init__(self, tensors: Mapping[str, Tensor], found: Mapping[str, tuple[str, PartPlace | None]]):
        self._tensors, self._found = tensors, found

    @override
    def __getitem__(self, name: str) -> Tensor:
        full, place = self._found[name]
        tensor = self._tensors[full]
        if place is None or not place.divided:
            return tensor
        if tensor.shape == place.shape:
            return tensor[place.index]
        if tensor.numel() == 1:
            return tensor
        raise BadCheckpoint(
            f"'{full}' of the checkpoint has shape {tuple(tensor.shape)}, and its parameter has shape "
            f"{place.shape}, so it cannot be divided as that is; resume with --parallel none"
        )

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    @override
    def __len__(self) -> int:
        return len(self._found)


def name_in(full: str) -> tuple[str, str, str]:
    """Return the name of a tensor's or a number's parameter, with what is before it and behind."""
    prefix, _, rest = full.partition("/")
    if prefix == PREFIX:
        name, slash, key = rest.rpartition("/")
        return f"{prefix}/", name, slash + key
    if prefix == EPOCHS:
        epoch, slash, name = rest.partition("/")
        return f"{prefix}/{epoch}{slash}", name, ""
    return f"{prefix}/", rest, ""


def buffers_in(shared: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Return the buffers by name that a trainer keeps in its state: the present ones, and of each epoch."""
    best = shared.get("best", {}).get("buffers", {})
    return [shared["training"]["buffers"], *(best[epoch] for epoch in sorted(best))]


def with_buffers(shared: Mapping[str, Any], buffers: Sequence[dict[str, Tensor]]) -> Values:
    """Return what a trainer shares with other buffers, in the order of `buffers_in`."""
    present, *kept = buffers
    best = {**shared.get("best", {})}
    if kept:
        best["buffers"] = dict(zip(sorted(best["buffers"]), kept, strict=True))
    return {**shared, "training": {**shared["training"], "buffers": present}, "best": best}
