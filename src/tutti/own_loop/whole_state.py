"""An optimizer's state in torch's form for its user, where it is stored in another."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from typing_extensions import override

State = dict[str, Any]
"""State of an optimizer for one parameter, by name."""


class WholeState(defaultdict[Any, State]):
    """An optimizer's state for the user's parameters, made when it is first read.

    It is the reader's own copy; the next step goes on from what the reader changes in it.
    """

    def __init__(self, make: Callable[[], dict[Any, State]]) -> None:
        super().__init__(dict)
        self._make, self._made = make, False
        # The values themselves, too: another object cannot get the identity of one that is held.
        self._known: tuple[object, list[object]] = {}, []

    def forget(self) -> None:
        """Have it made again when it is next read."""
        if self._made:
            super().clear()
            self._made = False

    def changed(self) -> bool:
        """Tell whether the reader has changed anything."""
        return self._made and self._versions()[0] != self._known[0]

    def _versions(self) -> tuple[object, list[object]]:
        """Return what identifies each value and how often it was changed in place, and the values."""
        held = [(id(key), name, value) for key, entries in super().items() for name, value in entries.items()]
        versions = {(key, name): (id(value), getattr(value, "_version", 0)) for key, name, value in held}
        return versions, [value for _, _, value in held]

    def _look(self) -> None:
        if not self._made:
            self._made = True
            for key, entries in self._make().items():
                super().__setitem__(key, entries)
            self._known = self._versions()

    @override
    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())


def _looking(name: str) -> Callable[..., Any]:
    """Return the method of a defaultdict that is called like this, which has the state made before."""
    method = getattr(defaultdict, name)

    def look(self: WholeState, *arguments: Any) -> Any:
        self._look()
        return method(self, *arguments)

    return look


for _name in ("getitem", "setitem", "delitem", "contains", "iter", "len", "eq", "repr"):
    setattr(WholeState, f"__{_name}__", _looking(f"__{_name}__"))
for _name in ("get", "pop", "popitem", "setdefault", "update", "clear", "keys", "values", "items", "copy"):
    setattr(WholeState, _name, _looking(_name))
