"""Makes the name "tutti" known to torch.distributed, without importing torch before somebody else does.

An entry point of the group "torch.backends" registers it whenever torch is imported. Where entry points are
not loaded (TORCH_DEVICE_BACKEND_AUTOLOAD=0, tutti on the path without being installed), `import tutti`
does so: now, if torch.distributed is there, else when it is imported.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

NAME = "tutti"
_HOME = "torch.distributed.distributed_c10d"
_RENDEZVOUS = "torch.distributed.rendezvous"

_describe: Callable[[], None] | None = None


def register() -> None:
    """Register the backend with torch.distributed, which is imported (the entry point)."""
    c10d = sys.modules.get(_HOME)
    backend = getattr(c10d, "Backend", None)
    if backend is not None and NAME.upper() not in backend._plugins:
        backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
        _describe_before_env()


def _describe_before_env() -> None:
    """Have the environment described before torch reads it (its init method env://)."""
    handlers = sys.modules[_RENDEZVOUS]._rendezvous_handlers
    read = handlers["env"]

    def describe_and_read(*args: Any, **kwargs: Any) -> Any:
        if _describe is not None:
            _describe()
        return read(*args, **kwargs)

    handlers["env"] = describe_and_read


def register_with_torch(describe: Callable[[], None]) -> None:
    """Register the backend as soon as torch.distributed is there.

    Args:
        describe: sets, under launchers that torch does not know, the variables that `env://` reads.
    """
    global _describe
    _describe = describe
    if _HOME in sys.modules:
        register()
    elif not any(isinstance(finder, _Watcher) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watcher())


def _create(options: Any, backend_options: object) -> ProcessGroup:
    from tutti.backend.group import create

    return create(options, backend_options)


class _Watcher(MetaPathFinder):
    """Has the import of one module followed by `register`, then goes away."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's ordinary specification, with a loader that also registers."""
        if name != _HOME:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


class _Registering(Loader):
    """A loader that registers when it is done."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """As the loader does; then register."""
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        register()
