"""torch's optimizers without torch's compiler, whose import takes a second."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import unwrap
from typing import Any, Final

import torch
from torch.optim import Optimizer

_MARK: Final = "__dynamo_disable"
"""Where torch keeps the form of a method that its compiler leaves alone."""


def defer_compiler() -> None:
    """Let optimizers be made without the compiler, which they import to exclude these methods from it."""
    methods: tuple[Any, ...] = (
        Optimizer.add_param_group,
        Optimizer.zero_grad,
        Optimizer.state_dict,
        Optimizer.load_state_dict,
    )
    for method in methods:
        inner = unwrap(method)
        if inner is not method:
            inner.__dict__.setdefault(_MARK, inner)


def plain_step(optimizer: Optimizer) -> Callable[[], object]:
    """Return an optimizer's step without the hooks, profiler and compiler that torch wraps around it."""
    kind: Any = type(optimizer)
    if not kind.__module__.startswith("torch.optim."):
        return optimizer.step
    return partial(torch.no_grad()(unwrap(kind.step)), optimizer)
