"""Registers the name "tutti" with torch.distributed, without importing torch before the program does.

An entry point of the group "torch.backends" registers it whenever torch is imported. Where entry points are
not loaded (TORCH_DEVICE_BACKEND_AUTOLOAD=0, tutti on the path without being installed), `import tutti`
does so: now, if torch.distributed is imported, else when it will be.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from itertools import count
from types import ModuleType
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

from tutti.torch_backend import NAME

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store  # type: ignore[attr-defined]

Rendezvous = Callable[[float], int | None]
"""The rendezvous of a host's ranks, within a number of seconds.

Returns the descriptor of the file that holds their store, or None: the environment says where they meet.
"""

_HOME = "torch.distributed.distributed_c10d"
_RENDEZVOUS_MODULE = "torch.distributed.rendezvous"
_TRACE_RULES = "torch._dynamo.trace_rules"
_UNTRACED = ("tutti.torch_backend", "tutti.comm")
_PLACE = ("rank", "world_size")
_NO_LAUNCHER = "tutti: no launcher started this process; use 'tutti run -n 2 SCRIPT', torchrun or mpirun"

_rendezvous: Rendezvous | None = None
_generations = count()


def register() -> None:
    """Register the backend with torch.distributed, which is imported (the entry point)."""
    c10d = sys.modules.get(_HOME)
    backend = getattr(c10d, "Backend", None)
    if backend is not None and NAME.upper() not in backend._plugins:
        backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        _rendezvous_before_env()
        _when_imported(_TRACE_RULES, _keep_untraced)


def _keep_untraced() -> None:
    """Let the compiler call a group's operations instead of tracing them, like other groups' C++."""
    for package in _UNTRACED:
        sys.modules[_TRACE_RULES].add(package)


def _rendezvous_before_env() -> None:
    """Make the ranks' rendezvous a file where possible, before torch reads the environment (env://)."""
    handlers = sys.modules[_RENDEZVOUS_MODULE]._rendezvous_handlers
    read = handlers["env"]

    def rendezvous_or_read(url: str, timeout: timedelta, **rest: Any) -> Iterator[tuple[Store, int, int]]:
        file = None if _rendezvous is None else _rendezvous(timeout.total_seconds())
        if file is not None and _as_described(url):
            yield _store_of(file, timeout)
        else:
            try:
                yield from read(url, timeout=timeout, **rest)
            except ValueError as error:
                if _rendezvous is not None and "RANK" not in os.environ:
                    error.add_note(_NO_LAUNCHER)
                raise

    handlers["env"] = rendezvous_or_read


def _as_described(url: str) -> bool:
    """Return whether `init_process_group` got the rank and size of the environment, or none."""
    given = dict(parse_qsl(urlsplit(url).query))
    return all(given.get(name, os.environ[name.upper()]) == os.environ[name.upper()] for name in _PLACE)


def _store_of(file: int, timeout: timedelta) -> tuple[Store, int, int]:
    """Return the store in a file; its keys are new at each rendezvous."""
    from torch.distributed import FileStore, PrefixStore  # type: ignore[attr-defined]

    rank, size = (int(os.environ[name.upper()]) for name in _PLACE)
    # The file stays open: C++ may use the store for as long as the process lives.
    store = FileStore(f"/proc/self/fd/{file}", size)
    store.set_timeout(timeout)
    return PrefixStore(str(next(_generations)), store), rank, size


def register_with_torch(rendezvous: Rendezvous) -> None:
    """Register the backend once torch.distributed is imported; `rendezvous` finds the ranks' store."""
    global _rendezvous
    _rendezvous = rendezvous
    _when_imported(_HOME, register)


def _when_imported(module: str, action: Callable[[], None]) -> None:
    """Call `action` now if a module is imported, else when it will be."""
    if module in sys.modules:
        action()
    elif not any(isinstance(finder, _Watcher) and finder.module == module for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher(module, action))


def _create(options: Any, backend_options: object) -> ProcessGroup:
    """Make a group of the calling ranks, from torch's `_DistributedBackendOptions` (collective)."""
    from tutti.torch_backend.group import TuttiGroup

    global_ranks = options.global_ranks_in_group or range(options.group_size)
    return TuttiGroup(options.store, options.group_rank, global_ranks, options.timeout)


class _Watcher(MetaPathFinder):
    """Calls a function after the import of one module, then disappears."""

    def __init__(self, module: str, action: Callable[[], None]) -> None:
        self.module, self._action = module, action

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's ordinary specification, with a loader that also calls."""
        if name != self.module:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and (loader := spec.loader) is not None:

            def run_and_call(module: ModuleType) -> None:
                del loader.exec_module  # of this object: the method of its class is there again
                loader.exec_module(module)
                self._action()

            loader.exec_module = run_and_call  # type: ignore[method-assign]
        return spec
