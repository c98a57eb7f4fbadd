"""Tensors of which each rank of a team has some channels, and the operations that make them whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from tutti.comm.base import Communicator, cut


@dataclass(frozen=True)
class Cut:
    """A cut of one dimension of a tensor over the ranks of a team.

    On the meta device nothing is exchanged.

    Attributes:
        team: the ranks.
        widths: the length of each rank's part; the parts follow one another.
        dim: the dimension.
    """

    team: Communicator
    widths: tuple[int, ...]
    dim: int

    @classmethod
    def of(cls, length: int, team: Communicator, dim: int) -> Cut:
        """Cut `length` into parts that differ by one at most."""
        return cls(team, tuple(part.stop - part.start for part in cut(length, team.size)), dim)

    def own(self, whole: Tensor) -> Tensor:
        """The part of this rank, a view."""
        rank = self.team.rank
        return whole.narrow(self.dim, sum(self.widths[:rank]), self.widths[rank])

    def gather(self, own: Tensor) -> Tensor:
        """The whole of all ranks' parts (collective)."""
        shape = list(own.shape)
        shape[self.dim] = max(
            self.widths
        )  # where the communicator cuts, all parts are as long as the longest
        rows = own.new_empty(len(self.widths), *shape)
        parts = [row.narrow(self.dim, 0, width) for row, width in zip(rows, self.widths, strict=True)]
        parts[self.team.rank].copy_(own)
        if not rows.is_meta:
            self.team.all_gather(rows.view(-1))
        return torch.cat(parts, self.dim)


class _Gather(Function):
    """The whole of the ranks' parts; of its gradient, which is the same on all ranks, the own channels."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, cut: Cut) -> Tensor:
        ctx.cut = cut
        return cut.gather(own)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.cut.own(gradients[0]), None


class _Enter(Function):
    """The identity on a tensor that every rank has whole; backward adds up its gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, team: Communicator) -> Tensor:
        ctx.team = team
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        # Short floats are added in fp32.
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.to(wide, copy=True).contiguous()
        if not total.is_meta:
            ctx.team.all_reduce(total.view(-1))
        return total.to(gradient.dtype), None


gather = cast("Callable[[Tensor, Cut], Tensor]", _Gather.apply)
enter = cast("Callable[[Tensor, Communicator], Tensor]", _Enter.apply)
