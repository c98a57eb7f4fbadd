"""Optimizers by name: torch's and ours."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn, optim
from torch.optim import Optimizer

from tutti.errors import BadOption, UnknownName
from tutti.load_object import call_with_options, load_object, names_object
from tutti.optim.sharded import UNUSABLE, check_usable
from tutti.registry import Registry

OPTIMIZERS: dict[str, type[Optimizer]] = {
    **{
        name.lower(): found
        for name, found in vars(optim).items()
        if isinstance(found, type) and issubclass(found, Optimizer) and found is not Optimizer
    },
    **Registry[type[Optimizer]]("tutti.optim.optimizers", "optimizer"),
}
"""Every optimizer of `torch.optim` and ours by lower-case name, also those without use here."""


def build(
    name: str,
    parameters: Iterable[nn.Parameter],
    lr: float | None = None,
    options: Mapping[str, Any] | None = None,
) -> Optimizer:
    """Build the optimizer that `name` stands for.

    Args:
        name: of a class of `torch.optim`, in any case, such as "adam"; of ours in
            `tutti.optim.optimizers`, such as "lamb"; or `package.module:Class` or `file.py:Class`.
        parameters: what it moves.
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
    """Return the class that a name stands for; for the errors see `build`."""
    if names_object(name):
        kind = load_object(name, "optimizer")
    elif name.lower() in OPTIMIZERS:
        kind = OPTIMIZERS[name.lower()]
    else:
        usable = [known for known, cls in OPTIMIZERS.items() if not issubclass(cls, tuple(UNUSABLE))]
        raise UnknownName("optimizer", name, usable)
    if not (isinstance(kind, type) and issubclass(kind, Optimizer)):
        raise BadOption(f"optimizer '{name}' is no class; expected a subclass of torch.optim.Optimizer")
    check_usable(kind)
    return kind
