"""An optimizer's state in torch's form for its user, where it is stored in another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor
from typing_extensions import override

State = dict[str, Any]
"""What an optimizer keeps for one parameter, by name."""


class WholeState(defaultdict[Any, State]):
    """An optimizer's state for the user's parameters, made when it is first read.

    It is the reader's own copy; the next step goes on from what the reader changes in it.

    Args:
        make: gives the state of all parameters.
    """

    def __init__(self, make: Callable[[], dict[Any, State]]) -> None:
        super().__init__(dict)
        self._make, self._made = make, False
        self._versions: dict[tuple[int, str], tuple[object, int]] = {}

    def forget(self) -> None:
        """Have it made again when it is next read."""
        if self._made:
            super().clear()
            self._made = False

    def changed(self) -> bool:
        """Tell whether the reader has changed anything."""
        if not self._made:
            return False
        held = [(id(key), name, value) for key, entries in super().items() for name, value in entries.items()]
        if len(held) != len(self._versions):
            return True
        for key, name, value in held:
            known = self._versions.get((key, name))
            if known is None or known[0] is not value or known[1] != _version_of(value):
                return True
        return False

    def _look(self) -> None:
        if not self._made:
            self._made = True
            for key, entries in self._make().items():
                super().__setitem__(key, entries)
            self._versions = {
                (id(key), name): (value, _version_of(value))
                for key, entries in super().items()
                for name, value in entries.items()
            }

    @override
    def __getitem__(self, key: Any) -> State:
        self._look()
        return super().__getitem__(key)

    @override
    def __setitem__(self, key: Any, value: State) -> None:
        self._look()
        super().__setitem__(key, value)

    @override
    def __delitem__(self, key: Any) -> None:
        self._look()
        super().__delitem__(key)

    @override
    def __contains__(self, key: object) -> bool:
        self._look()
        return super().__contains__(key)

    @override
    def __iter__(self) -> Iterator[Any]:
        self._look()
        return super().__iter__()

    @override
    def __len__(self) -> int:
        self._look()
        return super().__len__()

    @override
    def get(self, key: Any, default: Any = None) -> Any:
        self._look()
        return super().get(key, default)

    @override
    def pop(self, *arguments: Any) -> Any:
        self._look()
        return super().pop(*arguments)

    @override
    def clear(self) -> None:
        self._look()
        super().clear()

    @override
    def keys(self) -> Any:
        self._look()
        return super().keys()

    @override
    def values(self) -> Any:
        self._look()
        return super().values()

    @override
    def items(self) -> Any:
        self._look()
        return super().items()

    @override
    def __reduce__(self) -> Any:
        self._look()
        return defaultdict, (dict,), None, None, iter(self.items())


def _version_of(value: object) -> int:
    return value._version if isinstance(value, Tensor) else 0
