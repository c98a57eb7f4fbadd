"""The arguments of a process group's operations, in the several forms that torch's callers give."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ReduceOp

from tutti.torch_backend.errors import Unusable

Tensors = Sequence[Tensor] | Tensor


def listed(tensors: Tensors) -> Sequence[Tensor]:
    """The tensors as a sequence, also where only one was given."""
    return [tensors] if isinstance(tensors, Tensor) else tensors


def reduce_op(options: Any) -> Any:
    """The reduce operation of torch's options, or one given in their place; by default a sum."""
    return ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)


def root_of(options: Any) -> int:
    """The root of torch's options, or a rank given in their place; by default rank 0."""
    return int(getattr(options, "rootRank", options or 0))


def asynchronous(options: Any) -> bool:
    """Return whether the caller wants a work object; one who leaves the options out does."""
    return bool(getattr(options, "asyncOp", True))


def check_whole(what: str, part: Tensor, whole: Tensor, size: int) -> None:
    """Check that a whole has one part for each rank.

    Raises:
        Unusable: it does not.
    """
    if len(part) * size != len(whole) or part.dtype != whole.dtype:
        raise Unusable(
            f"{what} got one part of {len(part)} x {part.dtype} and a whole of {len(whole)} x {whole.dtype} "
            f"for {size} ranks; the whole must have {size} times as many elements, of the same dtype"
        )


def parts_of(parts: Sequence[Tensor], size: int) -> Sequence[Tensor]:
    """One part for each rank, also where the whole is empty."""
    return parts if len(parts) == size or any(map(len, parts)) else [parts[0]] * size
