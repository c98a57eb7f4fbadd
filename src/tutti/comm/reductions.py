"""The reductions of the ranks' vectors, in the order of the ranks: bit-equal in every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reduction:
    """One reduction of the ranks' vectors to one vector."""

    name: str  # in `torch.distributed`, in small letters
    number: int  # in a `Call`
    combine: Callable[..., Any]  # reduces two vectors, into `out`
    mean: bool = False  # whether the result is divided by the number of ranks

    @cached_property
    def partial(self) -> Reduction:
        """The same without the division, for a part of the ranks."""
        return replace(self, mean=False)

    def fold(self, rows: Sequence[Tensor], out: Tensor) -> None:
        """Overwrite `out` with the reduction of `rows`; it may be the first or the second of them."""
        if (len(rows) > 2 or self.mean or out.itemsize == 1) and rounds(out.dtype):
            # As float32, so that the sum is rounded only once.
            total = rows[0].float()
            for row in rows[1:]:
                self.combine(total, row.float(), out=total)
            if self.mean:
                total /= len(rows)
            out.copy_(total)
            return
        self.combine(rows[0], rows[1], out=out)
        for row in rows[2:]:
            self.combine(out, row, out=out)
        if self.mean:
            self.finish(out, len(rows))

    def finish(self, total: Tensor, size: int) -> None:
        """Divide, where the operation is a mean; integers are rounded towards zero."""
        if self.mean:
            total.div_(size, rounding_mode=None if total.is_floating_point() else "trunc")


SUM: Final = Reduction("sum", 0, torch.add)
REDUCTIONS: Final = (
    SUM,
    Reduction("avg", 1, torch.add, mean=True),
    Reduction("product", 2, torch.mul),
    Reduction("min", 3, torch.minimum),
    Reduction("max", 4, torch.maximum),
    Reduction("band", 5, torch.bitwise_and),
    Reduction("bor", 6, torch.bitwise_or),
    Reduction("bxor", 7, torch.bitwise_xor),
)


def rounds(dtype: torch.dtype) -> bool:
    """Return whether sums of such numbers are formed as float32 and rounded once."""
    return dtype.is_floating_point and dtype.itemsize < 4
