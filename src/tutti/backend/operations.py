"""The reduce operations of torch.distributed, in the order of the ranks: bit-equal in every run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from tutti.backend.failures import Unusable


@dataclass(frozen=True)
class Reduction:
    """One way to make one vector of the ranks' vectors.

    Attributes:
        name: what torch calls it.
        number: what it is called in a `Call`.
        combine: makes one of two, into `out`.
        mean: whether the result is divided by the number of ranks.
        factor: what every rank's vector is multiplied with before, or None.
    """

    name: str
    number: int
    combine: Callable[..., Any]
    mean: bool = False
    factor: Any = None

    def fold(self, rows: Sequence[Tensor], out: Tensor) -> None:
        """Overwrite `out` with what `rows` make together; it may be the first or the second of them."""
        if (len(rows) > 2 or self.mean or out.itemsize == 1) and _rounds(out.dtype):
            # Rounded but once.
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
        """Divide, where the operation is a mean; whole numbers are rounded towards zero."""
        if self.mean:
            total.div_(size, rounding_mode=None if total.is_floating_point() else "trunc")


_SUM: Final = Reduction("sum", 0, torch.add)
_OPS: Final = (
    (ReduceOp.SUM, _SUM),
    (ReduceOp.AVG, Reduction("avg", 1, torch.add, mean=True)),
    (ReduceOp.PRODUCT, Reduction("product", 2, torch.mul)),
    (ReduceOp.MIN, Reduction("min", 3, torch.minimum)),
    (ReduceOp.MAX, Reduction("max", 4, torch.maximum)),
    (ReduceOp.BAND, Reduction("band", 5, torch.bitwise_and)),
    (ReduceOp.BOR, Reduction("bor", 6, torch.bitwise_or)),
    (ReduceOp.BXOR, Reduction("bxor", 7, torch.bitwise_xor)),
)
PREMUL: Final = 8
REDUCTION_NAMES: Final = {**{way.number: way.name for _, way in _OPS}, PREMUL: "premul_sum"}
# An instance equals the plain value that torch's enumeration has for it; the other way round it does not.
_BY_OP: Final[dict[Any, Reduction]] = {ReduceOp(op): way for op, way in _OPS}
_BITWISE: Final = (5, 6, 7)


def reduction_of(op: Any, dtype: torch.dtype) -> Reduction:
    """The reduction that a `ReduceOp` stands for.

    Args:
        op: a `ReduceOp`, or one of its values.
        dtype: of the vectors.

    Raises:
        Unusable: there is no such operation, or it does not go with the dtype.
    """
    if op == ReduceOp.SUM:
        return _SUM
    way = _BY_OP.get(op)
    if way is None:
        if op == ReduceOp.PREMUL_SUM:
            return Reduction("premul_sum", PREMUL, torch.add, factor=op.__getstate__()[1])
        known = ", ".join(str(each).rpartition(".")[2] for each, _ in _OPS)
        raise Unusable(f"there is no reduce operation {op}; give one of ReduceOp.{known}, PREMUL_SUM")
    if way.number in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise Unusable(
            f"{op} works on whole numbers, and these are {dtype}; give integers, or another operation"
        )
    return way


def _rounds(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize < 4
