"""Tensors of which each rank of a team has only some channels, and the ways to make them whole.

Who reads the whole decides what becomes of its gradient:

    the reader                               forward      backward
    does the same on all ranks (a loss)      all_gather   all have the whole gradient: take the own channels
    is a layer that is cut over the ranks    all_gather   each has a part of the sum: reduce_scatter

Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models", section 4.2: the
second pair, and that a rank keeps only its share and gathers the whole once more in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks

from tutti.comm.base import Communicator, cut


@dataclass(frozen=True)
class Cut:
    """A cut of one dimension of a tensor over the ranks of a team.

    On the meta device nothing is exchanged.

    Attributes:
        team: the ranks.
        widths: how long each rank's part is; the parts follow one another.
        dim: the dimension, from 0.
    """

    team: Communicator
    widths: tuple[int, ...]
    dim: int

    @classmethod
    def of(cls, length: int, team: Communicator, dim: int) -> Cut:
        """Cut `length` into parts that differ by one at most."""
        return cls(team, tuple(part.stop - part.start for part in cut(length, team.size)), dim)

    @property
    def length(self) -> int:
        """The length of the whole."""
        return sum(self.widths)

    @property
    def start(self) -> int:
        """Index at which the part of this rank begins."""
        return sum(self.widths[: self.team.rank])

    def own(self, whole: Tensor) -> Tensor:
        """The part of this rank, a view."""
        return whole.narrow(self.dim, self.start, self.widths[self.team.rank])

    def gather(self, own: Tensor) -> Tensor:
        """The whole of all ranks' parts (collective)."""
        rows = self._rows(own, own.dtype)
        parts = self._parts(rows)
        parts[self.team.rank].copy_(own)
        if not rows.is_meta:
            self.team.all_gather(rows.view(-1))
        return torch.cat(parts, self.dim)

    def add_up(self, whole: Tensor) -> Tensor:
        """The part of this rank of the sum over the ranks (collective); short floats are added in fp32."""
        rows = self._rows(whole, _wide(whole.dtype))
        parts = self._parts(rows)
        for part, piece in zip(parts, torch.split(whole, list(self.widths), self.dim), strict=True):
            part.copy_(piece)
        if not rows.is_meta:
            self.team.reduce_scatter(rows.view(-1))
        return parts[self.team.rank].to(whole.dtype, copy=True)

    def _rows(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        """Room for each rank's part; all are as long as the longest, where the communicator cuts."""
        shape = list(like.shape)
        shape[self.dim] = max(self.widths)
        return like.new_empty(len(self.widths), *shape, dtype=dtype)

    def _parts(self, rows: Tensor) -> list[Tensor]:
        return [row.narrow(self.dim, 0, width) for row, width in zip(rows, self.widths, strict=True)]


@dataclass(frozen=True)
class TensorShare:
    """The part of a tensor that this rank has.

    Attributes:
        own: the part.
        cut: what the whole is.
    """

    own: Tensor
    cut: Cut


def whole(value: Tensor | TensorShare) -> Tensor:
    """All of a tensor, for a reader that does the same on every rank."""
    return _gather(value.own, value.cut, value.cut.own) if isinstance(value, TensorShare) else value


def for_shares(value: Tensor | TensorShare, team: Communicator) -> Tensor:
    """All of a tensor, for a reader of which each rank has a share, and so a part of the gradient."""
    return (
        _gather(value.own, value.cut, value.cut.add_up)
        if isinstance(value, TensorShare)
        else _enter(value, team)
    )


def kept_as_share(share: TensorShare, gathered: Tensor) -> saved_tensors_hooks:
    """Have autograd keep a share in place of the whole that was gathered of it.

    In the backward pass it is gathered once more.
    """
    own, cut, place = share.own.detach(), share.cut, gathered.untyped_storage()._cdata

    def pack(saved: Tensor) -> Tensor | tuple[Any, ...]:
        if saved.untyped_storage()._cdata != place:
            return saved
        return saved.size(), saved.stride(), saved.storage_offset()

    def unpack(kept: Tensor | tuple[Any, ...]) -> Tensor:
        nonlocal own
        if isinstance(kept, Tensor):
            return kept
        again = cut.gather(own)
        # A part of the whole from here on: while that is there, no other copy need be.
        own = cut.own(again)
        return again.as_strided(*kept)

    return saved_tensors_hooks(pack, unpack)


class _Gather(Function):
    """The whole of the ranks' parts; `back` makes the part's gradient of the whole's."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, cut: Cut, back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.back = back
        return cut.gather(own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.back(gradients[0]), None, None


class _Enter(Function):
    """The identity on a tensor that every rank has whole; backward adds up its gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, team: Communicator) -> Tensor:
        ctx.team = team
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        total = gradient.to(_wide(gradient.dtype), copy=True).contiguous()
        if not total.is_meta:
            ctx.team.all_reduce(total.view(-1))
        return total.to(gradient.dtype), None


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


_gather = cast("Callable[[Tensor, Cut, Callable[[Tensor], Tensor]], Tensor]", _Gather.apply)
_enter = cast("Callable[[Tensor, Communicator], Tensor]", _Enter.apply)
