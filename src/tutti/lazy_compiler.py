"""torch's compiler, imported when it is used: with the first optimizer, as torch does, it takes a second."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, Final, TypeVar

_NAME: Final = "torch._dynamo"
_Function = TypeVar("_Function", bound=Callable[..., Any])


class _LazyCompiler(ModuleType):
    """Stands for `torch._dynamo` until anything but what optimizers call is asked for.

    An optimizer only says what not to compile, which has no effect while nothing is compiled.
    """

    def graph_break(self, msg: str = "") -> None:
        """Called before and after each step."""

    def disable(self, fn: _Function, recursive: bool = True, *, wrapping: bool = True) -> _Function:
        """Called for each method of an optimizer that is not to be compiled."""
        return fn

    def __getattr__(self, name: str) -> Any:
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        return getattr(import_module(_NAME), name)


def defer_compiler() -> None:
    """Leave `torch._dynamo` out until it is used; nothing, if it has been imported."""
    sys.modules.setdefault(_NAME, _LazyCompiler(_NAME))
