"""The reduce operations of torch.distributed."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch.distributed import ReduceOp

from tutti.comm.reductions import REDUCTIONS, SUM, Reduction
from tutti.torch_backend.errors import Unusable

# An instance equals the plain value that torch's enumeration has for it; the other way round it does not.
_BY_OP: Final[dict[Any, Reduction]] = {
    ReduceOp(getattr(ReduceOp, reduction.name.upper())): reduction for reduction in REDUCTIONS
}
_BITWISE: Final = ("band", "bor", "bxor")
_MOVED: Final = frozenset({torch.uint16, torch.uint32, torch.uint64})
"""The dtypes that torch cannot compute with on the CPU."""


def reduction_of(op: Any, dtype: torch.dtype) -> Reduction:
    """The reduction that a `ReduceOp` stands for.

    Args:
        op: a `ReduceOp`, or one of its values.
        dtype: of the vectors.

    Raises:
        Unusable: there is no such operation, or it does not go with the dtype.
    """
    if op == ReduceOp.SUM and dtype not in _MOVED:
        return SUM
    reduction = _BY_OP.get(op)
    if reduction is None:
        known = ", ".join(each.name.upper() for each in REDUCTIONS)
        raise Unusable(f"there is no reduce operation {op}; give one of ReduceOp.{known}")
    bitwise = reduction.name in _BITWISE
    floats = dtype.is_floating_point or dtype.is_complex
    kind = ""
    if bitwise and floats:
        kind = "integers"
    elif dtype in _MOVED and not bitwise:
        kind = "signed integers or floats"
    elif dtype is torch.bool and reduction.mean:
        kind = "floats"
    if kind:
        raise Unusable(f"ReduceOp.{reduction.name.upper()} of {dtype} tensors is not possible; give {kind}")
    return reduction
