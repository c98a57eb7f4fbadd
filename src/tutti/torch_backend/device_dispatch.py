"""Tensors on devices for which the job asked for another backend, as with "cpu:tutti,cuda:nccl"."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, distributed
from torch.distributed import PrefixStore, ProcessGroup, Store  # type: ignore[attr-defined]

from tutti.torch_backend import NAME
from tutti.torch_backend.errors import Unusable


class DeviceDispatch:
    """The backends of the group's other devices; they meet in its store."""

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._groups: dict[str, ProcessGroup | None] = {}

    def backend_for(self, group: ProcessGroup, device: torch.device) -> ProcessGroup | None:
        """The group that serves a device; None: `group` itself.

        Raises:
            Unusable: that backend is one that tutti cannot make.
        """
        if device.type not in self._groups:
            # What the job asked for is known only after the group was made.
            pairs = [pair.partition(":") for pair in distributed.get_backend_config(group).split(",")]
            backend = {kind: name for kind, _, name in pairs}.get(device.type) or NAME
            self._groups[device.type] = None if backend == NAME else self._make(backend, device)
        return self._groups[device.type]

    def _make(self, backend: str, device: torch.device) -> ProcessGroup:
        makers: dict[str, Callable[[Store], tuple[Any, Any]]] = {"nccl": self._nccl, "gloo": self._gloo}
        if backend not in makers:
            raise Unusable(
                f"the job asks for the backend {backend} for {device.type} tensors beside tutti; expected "
                f"one of {', '.join([NAME, *makers])}"
            )
        store = PrefixStore(f"{device.type}/", self._store)
        kind, made = makers[backend](store)
        group = ProcessGroup(store, self._rank, self._size)
        group._set_default_backend(kind)
        group._register_backend(torch.device(device.type), kind, made)
        return group

    def _nccl(self, store: Store) -> tuple[Any, Any]:
        if not distributed.is_nccl_available():
            raise Unusable(
                "the job asks for NCCL for its CUDA tensors, and this torch was built without it; install a "
                f"CUDA build of torch, or ask for {NAME} alone"
            )
        options = distributed.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        made = distributed.ProcessGroupNCCL(store, self._rank, self._size, options)
        return ProcessGroup.BackendType.NCCL, made

    def _gloo(self, store: Store) -> tuple[Any, Any]:
        made = distributed.ProcessGroupGloo(store, self._rank, self._size, timeout=self._timeout)
        return ProcessGroup.BackendType.GLOO, made

    def close(self) -> None:
        """End the other backends."""
        for group in self._groups.values():
            if group is not None:
                group.shutdown()
        self._groups.clear()


P = ParamSpec("P")
R = TypeVar("R")


Method = Callable[Concatenate[Any, P], R]
"""An operation of a group that has a `DeviceDispatch` as `_dispatch`."""


def dispatched(name: str) -> Callable[[Method[P, R]], Method[P, R]]:
    """Have an operation of a group, which torch calls `name`, done by the backend of the tensors' device."""

    def decorate(operation: Method[P, R]) -> Method[P, R]:
        @functools.wraps(operation)
        def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> R:
            tensor = _first(args)
            if tensor is not None and not tensor.is_cpu:
                other = self._dispatch.backend_for(self, tensor.device)
                if other is not None:
                    method = getattr(other, name)
                    return cast("R", method(*(one for one in args if one is not None), **kwargs))
            return operation(self, *args, **kwargs)

        return call

    return decorate


def _first(arguments: Any) -> Tensor | None:
    """The first tensor in arguments that are tensors, lists of them, or lists of such lists."""
    for one in arguments:
        if isinstance(one, Tensor):
            return one
        if isinstance(one, list | tuple) and (found := _first(one)) is not None:
            return found
    return None
