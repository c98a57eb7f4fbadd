"""The state of training: the named values needed to continue exactly from the same point.

An object with state has two methods:

    state() -> State             its present state; the tensors are live, and change with the next step
    load_state(Saved)            continue from the state of such an object, in this run or an earlier one

State that several ranks hold together, such as slices of an optimizer's state, is kept by parameter. So
another number of ranks can hold it in other slices:

    rank 0   optimizer/0.weight/exp_avg [0:600]                         ┐
    rank 1   optimizer/0.weight/exp_avg [600:1000]  .../0.bias/exp_avg  ┴─▶ 3 ranks: [0:400], [400:800], ...
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, nn

from tutti.errors import BadCheckpoint
from tutti.replica import Flat, local, view_like

Values: TypeAlias = dict[str, Any]
"""A tree of named values: None, truth values, numbers, texts, tensors, and lists and dictionaries of them.

The keys are texts. A tuple comes back as a list.
"""

_ORDERS: Final = {
    "channels_last": torch.channels_last,
    "channels_last_3d": torch.channels_last_3d,
    "rows": torch.contiguous_format,
}


@dataclass(frozen=True)
class TensorPiece:
    """Consecutive elements of a tensor that belongs to a parameter of the model."""

    name: str  # of the whole tensor, such as "weights/0.weight" or "optimizer/0.weight/exp_avg"
    start: int  # the number of its first element, in the order of memory
    values: Tensor  # of shape (elements,)
    shape: tuple[int, ...]  # of the whole tensor
    order: str = "rows"  # of its elements in memory; or "channels_last", "channels_last_3d"

    @property
    def stop(self) -> int:
        """The number of the element after its last."""
        return self.start + len(self.values)


@dataclass
class LocalState:
    """Tensors and numbers that belong to parameters of the model, by their names."""

    pieces: list[TensorPiece] = field(default_factory=list)
    numbers: Values = field(default_factory=dict)

    def add(self, other: LocalState) -> None:
        """Add the pieces and numbers of another one."""
        self.pieces += other.pieces
        self.numbers |= other.numbers


@dataclass
class State:
    """The whole state of one rank. The tensors are live: copy them at once to keep them."""

    # This rank's part of the state that all ranks hold together. Several ranks may have the same piece.
    joint: LocalState = field(default_factory=LocalState)
    # This rank's state for the whole model, such as its own optimizer's. Another number of ranks loses it.
    alone: LocalState = field(default_factory=LocalState)
    shared: Values = field(default_factory=dict)  # equal on all ranks; rank 0's is kept
    own: Values = field(default_factory=dict)  # private to this rank; lost likewise


@dataclass(frozen=True)
class Named:
    """Pieces and numbers, put together."""

    tensors: Mapping[str, Tensor]  # whole, each in its shape, by name. They must not be changed
    numbers: Mapping[str, Any]  # by name


@dataclass(frozen=True)
class Saved:
    """The saved state from which one rank continues; the fields are those of `State`."""

    joint: Named
    alone: Named | None  # None: another number of ranks, or another strategy, saved it
    shared: Values
    own: Values | None  # None as with `alone`

    def part(self, name: str) -> Saved:
        """Return the same with the values kept under a name."""
        own = None if self.own is None else self.own.get(name, {})
        return Saved(self.joint, self.alone, self.shared.get(name, {}), own)


def order_of(tensor: Tensor) -> str:
    """Return the order of a dense tensor's elements in memory: see `TensorPiece.order`."""
    order = {4: "channels_last", 5: "channels_last_3d"}.get(tensor.dim(), "rows")
    own = not tensor.is_contiguous() and tensor.is_contiguous(memory_format=_ORDERS[order])
    return order if own else "rows"


def pieces_of(prefix: str, flat: Flat, vector: Tensor, place: slice) -> Iterator[TensorPiece]:
    """Cut a stretch of a vector with a replica's layout into pieces, by parameter."""
    for name, parameter, span in zip(flat.names, flat.parameters, flat.spans, strict=True):
        start, stop = max(span.start, place.start), min(span.stop, place.stop)
        if start < stop:
            yield piece_of(name_of(prefix, name), parameter, start - span.start, vector[start:stop])
        elif span.start == span.stop:  # every rank has all of a parameter without elements
            yield piece_of(name_of(prefix, name), parameter, 0, vector[span])


def pieces_of_all(prefix: str, flats: Sequence[Flat], vectors: Sequence[Tensor]) -> Iterator[TensorPiece]:
    """Cut vectors with a replica's layout into pieces, one for each parameter."""
    for flat, vector in zip(flats, vectors, strict=True):
        yield from pieces_of(prefix, flat, vector, slice(0, len(vector)))


def piece_of(name: str, like: nn.Parameter, start: int, values: Tensor) -> TensorPiece:
    """Return a piece of a tensor with the memory layout of a parameter."""
    return TensorPiece(name, start, values, tuple(like.shape), order_of(like))


def whole_piece(name: str, tensor: Tensor) -> TensorPiece:
    """Return a tensor as a piece (for a DTensor, this rank's part), sharing dense memory."""
    tensor = local(tensor.detach())
    order = order_of(tensor)
    dense = tensor.contiguous(memory_format=_ORDERS[order])
    return TensorPiece(name, 0, dense.as_strided((dense.numel(),), (1,)), tuple(tensor.shape), order)


@torch.no_grad()
def fill(joint: Mapping[str, Tensor], prefix: str, flat: Flat, vector: Tensor, place: slice) -> None:
    """Overwrite a stretch of a vector with the pieces of `pieces_of`, put together by `joined`."""
    for name, parameter, span in zip(flat.names, flat.parameters, flat.spans, strict=True):
        start, stop = max(span.start, place.start), min(span.stop, place.stop)
        if start < stop:
            whole = find(joint, name_of(prefix, name), parameter)
            laid = torch.empty(parameter.numel(), dtype=whole.dtype)
            view_like(laid, parameter).copy_(whole)
            vector[start:stop] = laid[start - span.start : stop - span.start]


def fill_all(
    held: Mapping[str, Tensor], prefix: str, flats: Sequence[Flat], vectors: Sequence[Tensor]
) -> None:
    """Overwrite vectors with the pieces of `pieces_of_all`; raises what `fill` raises."""
    for flat, vector in zip(flats, vectors, strict=True):
        fill(held, prefix, flat, vector, slice(0, len(vector)))


def put_under(prefix: str, held: LocalState) -> LocalState:
    """Return the same under names that begin with `prefix/`."""
    pieces = [replace(piece, name=f"{prefix}/{piece.name}") for piece in held.pieces]
    return LocalState(pieces, {f"{prefix}/{name}": value for name, value in held.numbers.items()})


def found_under(prefix: str, held: Named) -> Named:
    """Return what `put_under` put under the prefix, by the names that it had before."""
    start = f"{prefix}/"

    def under(values: Mapping[str, Any]) -> dict[str, Any]:
        # By name: a tensor is read only when asked for.
        return {name.removeprefix(start): values[name] for name in values if name.startswith(start)}

    return Named(under(held.tensors), under(held.numbers))


def find(joint: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    """Return a whole tensor, or raise BadCheckpoint if it is missing or has another shape than `like`."""
    whole = joint.get(name)
    if whole is None:
        raise BadCheckpoint(f"the checkpoint has no '{name}'; it was made of another model or optimizer")
    if whole.shape != like.shape:
        raise BadCheckpoint(
            f"'{name}' has shape {tuple(whole.shape)} in the checkpoint, and {tuple(like.shape)} in this "
            "run; resume with the model that the checkpoint was made of"
        )
    return whole


def name_of(prefix: str, parameter: str, key: str = "") -> str:
    """Return the name of a tensor that belongs to a parameter. The key has no slash; a parameter's may."""
    return f"{prefix}/{parameter}/{key}" if key else f"{prefix}/{parameter}"


def named(held: Iterable[LocalState]) -> Named:
    """Put together what several ranks hold."""
    all_held = list(held)
    numbers = {name: value for one in reversed(all_held) for name, value in one.numbers.items()}
    return Named(joined(piece for one in all_held for piece in one.pieces), numbers)


def joined(pieces: Iterable[TensorPiece]) -> dict[str, Tensor]:
    """Put pieces together into whole tensors, each in its shape and order of memory."""
    by_name: dict[str, list[TensorPiece]] = {}
    for piece in pieces:
        by_name.setdefault(piece.name, []).append(piece)
    return {name: _join(name, found) for name, found in by_name.items()}


def _join(name: str, pieces: list[TensorPiece]) -> Tensor:
    first = pieces[0]
    size = torch.Size(first.shape).numel()
    if first.start == 0 and len(first.values) == size:
        vector = first.values
    else:
        vector, at = first.values.new_empty(size), 0
        for piece in sorted(pieces, key=lambda one: (one.start, -one.stop)):
            if (piece.shape, piece.order, piece.values.dtype) != (first.shape, first.order, vector.dtype):
                raise BadCheckpoint(
                    f"the pieces of '{name}' do not belong together: they differ in shape or type"
                )
            if piece.start > at:
                break
            vector[piece.start : piece.stop] = piece.values
            at = max(at, piece.stop)
        if at < size:
            raise BadCheckpoint(f"'{name}' is not whole: elements from number {at} are missing, of {size}")
    like = torch.empty(first.shape, dtype=vector.dtype, device="meta").to(memory_format=_ORDERS[first.order])
    return vector.as_strided(like.shape, like.stride(), vector.storage_offset())


def in_own_memory(state: Any) -> Any:
    """Return copies of values: views would be pickled with the whole tensors behind them."""
    if isinstance(state, Tensor):
        return state.detach().cpu().clone()
    if type(state) is list:
        return list(map(in_own_memory, state))
    return {name: in_own_memory(one) for name, one in state.items()} if type(state) is dict else state
