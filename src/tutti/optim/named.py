"""Optimizers by name: torch's and ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tutti.errors import BadOption
from tutti.load_object import call_with_options, names_object
from tutti.optim.sharded import check_usable
from tutti.parts import OPTIMIZERS


def build(
    name: str,
    parameters: Iterable[nn.Parameter],
    lr: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> Optimizer:
    """Build the optimizer called `name`.

    Args:
        name: of a class of `torch.optim`, in any case, such as "adam"; of ours in
            `tutti.optim.optimizers`, such as "lamb"; or `package.module:Class` or `file.py:Class`.
        parameters: the parameters to optimize.
        lr: learning rate; by default the optimizer's own.
        options: its other options by name; a list stands for a tuple.

    Raises:
        UnknownName: there is no such optimizer, or it has no such option.
        BadOption: a value that it refuses, or an optimizer that cannot be used here.
    """
    given = {
        key: tuple(value) if isinstance(value, list) else value for key, value in (options or {}).items()
    }
    for key in ("params", "lr"):
        if key in given:
            raise BadOption(
                f"option '{key}' of optimizer '{name}' is not given like this; use --lr for the rate"
            )
    kind = optimizer_class(name)
    given |= {} if lr is None else {"lr": lr}
    try:
        optimizer = call_with_options(kind, given, "optimizer", name, {"params": parameters})
    except (TypeError, ValueError, RuntimeError) as error:
        written = ", ".join(f"{key}={value!r}" for key, value in given.items()) or "its own options"
        raise BadOption(f"optimizer '{name}' cannot be made with {written}: {error}") from error
    assert isinstance(optimizer, Optimizer)
    return optimizer


def optimizer_class(name: str) -> type[Optimizer]:
    """Return the optimizer class called `name`; for the errors see `build`."""
    kind = OPTIMIZERS.load(name if names_object(name) else name.lower())
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise BadOption(f"optimizer '{name}' is no class; expected a subclass of torch.optim.Optimizer")
    check_usable(kind)
    return kind
