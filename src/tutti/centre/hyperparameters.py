"""An optimizer's options as a list of numbers, which can travel with a message."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class Hyperparameters:
    """The numbers among the options of an optimizer's param groups, in an order that is the same everywhere.

    Args:
        optimizer: the optimizer. On the other side there is one that was made in the same way.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._names = [
            (number, name)
            for number, group in enumerate(optimizer.param_groups)
            # A scheduler may add options of its own, and there may be none on the other side.
            for name in sorted(optimizer.defaults)
            if name in group and _numbers(group[name])
        ]

    def read(self) -> list[float]:
        """Their values now."""
        groups = self._optimizer.param_groups
        return [float(value) for number, name in self._names for value in _numbers(groups[number][name])]

    def write(self, values: list[float]) -> None:
        """Set them; a number keeps its type, and a tensor its identity."""
        at = 0
        for number, name in self._names:
            group = self._optimizer.param_groups[number]
            old = group[name]
            numbers = _numbers(old)
            new = [_like(a, b) for a, b in zip(numbers, values[at : at + len(numbers)], strict=True)]
            group[name] = type(old)(new) if isinstance(old, tuple | list) else new[0]
            at += len(numbers)


def _numbers(value: Any) -> list[Any]:
    """The numbers in an option: itself, or a tuple's; none if it is something else."""
    if isinstance(value, tuple | list):
        inner = [_numbers(one) for one in value]
        return [one for found in inner for one in found] if all(len(found) == 1 for found in inner) else []
    if isinstance(value, bool | int | float):
        return [value]
    return [value] if isinstance(value, Tensor) and value.numel() == 1 else []


def _like(old: Any, value: float) -> Any:
    if isinstance(old, Tensor):
        old.fill_(value)
        return old
    return type(old)(value)
