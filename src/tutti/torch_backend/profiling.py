"""The events of an operation in torch's profiler, like those of torch's own backends.

c10d::allreduce_    the call
tutti:all_reduce    the operation, from the call until it is over, also where it goes on in another thread
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, TypeVar

from torch import Tensor
from torch._C._profiler import _RecordFunctionFast
from torch.autograd.profiler import record_function

from tutti.torch_backend.registration import NAME

if TYPE_CHECKING:
    from tutti.torch_backend.work import Operation

Returned = TypeVar("Returned", bound="Operation | None")

_IN_TORCH: Final = {
    "all_reduce": "allreduce_",
    "reduce": "reduce_",
    "reduce_scatter": "reduce_scatter_",
    "reduce_scatter_single": "_reduce_scatter_base_",
    "broadcast": "broadcast_",
    "all_gather": "allgather_",
    "all_gather_single": "_allgather_base_",
    "gather": "gather_",
    "scatter": "scatter_",
    "all_to_all": "alltoall_",
    "all_to_all_single": "alltoall_base_",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier_",
    "send": "send",
    "recv": "recv_",
}
"""The operations' names in torch's dispatcher."""


def profiled(what: str, tensors: Sequence[Tensor], call: Callable[[], Returned]) -> Returned:
    """Make a call that begins an operation, and have the profiler record both.

    Args:
        what: the operation's name; it may go on after a space.
        tensors: those whose shapes are recorded.
        call: begins the operation and returns it, or returns None when it is over.
    """
    name = what.split()[0]
    with (
        _RecordFunctionFast(f"c10d::{_IN_TORCH[name]}", list(tensors)),
        record_function(f"{NAME}:{name.removesuffix('_single')}") as record,
    ):
        operation = call()
        if operation is not None and not operation.done:
            # The profiler watches this thread, and loses what ends in another, unless a future ends it.
            record._call_end_callbacks_on_future(operation.outcome())
        return operation
