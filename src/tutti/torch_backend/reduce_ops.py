"""The reduce operations of torch.distributed."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.distributed import ReduceOp

from tutti.comm.reductions import REDUCTIONS, SUM, Reduction, premul_sum
from tutti.torch_backend.errors import Unusable

# An instance equals the plain value that torch's enumeration has for it; the other way round it does not.
_BY_OP: Final[dict[Any, Reduction]] = {
    ReduceOp(getattr(ReduceOp, reduction.name.upper())): reduction for reduction in REDUCTIONS
}
_BITWISE: Final = ("band", "bor", "bxor")


def reduction_of(op: Any, dtype: torch.dtype) -> Reduction:
    """The reduction that a `ReduceOp` stands for.

    Args:
        op: a `ReduceOp`, or one of its values.
        dtype: of the vectors.

    Raises:
        Unusable: there is no such operation, or it does not go with the dtype.
    """
    if op == ReduceOp.SUM:
        return SUM
    reduction = _BY_OP.get(op)
    if reduction is None:
        if op == ReduceOp.PREMUL_SUM:
            return premul_sum(op.__getstate__()[1])
        known = ", ".join(each.name.upper() for each in REDUCTIONS)
        raise Unusable(f"there is no reduce operation {op}; give one of ReduceOp.{known}, PREMUL_SUM")
    if reduction.name in _BITWISE and (dtype.is_floating_point or dtype.is_complex):
        raise Unusable(
            f"ReduceOp.{reduction.name.upper()} works on whole numbers, and these are {dtype}; give "
            "integers, or another operation"
        )
    return reduction
