"""The stub of a group in torch's C++: a backend with a name and no operations.

Since version 2.14, torch asks a group's backends for more than the group: the flight recorder for their name,
batched messages for their abilities. Version 2.13 does not ask, nor lets Python make one.

Of an operation that is written in Python, C++ keeps only the part that is C++, which can do nothing alone.
"""

# torch's stubs have properties where these are plain values.
# mypy: disable-error-code="override, assignment"

from __future__ import annotations

from datetime import timedelta

from torch._C import _distributed_c10d
from torch._C._distributed_c10d import Backend, Reducer, Work
from torch.distributed import ProcessGroup

from tutti.torch_backend import NAME
from tutti.torch_backend.work import Operation


class BackendStub(Backend):
    """The stub of a group in C++; the group itself does all the work.

    Every property is defined here because C++'s look for a Python one, find themselves, and recurse for ever.
    """

    supports_splitting = supports_coalescing = supports_shrinking = False
    supports_reconfigure = supports_window = False
    supports_time_estimate = _supports_time_estimate = False

    def __init__(self, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._options = Backend.Options(NAME, timeout)

    def name(self) -> str:
        """Return the backend's name."""
        return NAME

    getBackendName = name

    @property
    def options(self) -> Backend.Options:
        """The options that the group was made with."""
        return self._options


def register_stub(group: ProcessGroup, timeout: timedelta) -> BackendStub | None:
    """Return a stub of a group, to be kept by the caller; None with torch 2.13, which cannot make one."""
    try:
        made = BackendStub(group.rank(), group.size(), timeout)
    except TypeError:
        return None
    for device in group._device_types:
        group._register_backend(device, ProcessGroup.BackendType.CUSTOM, made)
    group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
    return made


_hold = Reducer._set_forward_pass_work_handle


def _hold_whole(reducer: Reducer, work: Work, use_static_world_size: bool) -> None:
    """Let a reducer wait for an operation that has no other owner (`DistributedDataParallel.join`)."""
    if isinstance(work, Operation):
        work = _distributed_c10d._create_work_from_future(work.get_future())  # type: ignore[attr-defined]
    _hold(reducer, work, use_static_world_size)


# The only place of torch that hands to C++ what Python has got from a group, and then forgets it.
Reducer._set_forward_pass_work_handle = _hold_whole
