"""An optimizer's state by the names of the model's parameters, as it is written into checkpoints.

optimizer/0.weight/exp_avg       a tensor in the parameter's shape, of which each rank may have a piece
optimizer/0.weight/step          a counter of the parameter, or a tensor of another shape: whole
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.errors import BadCheckpoint
from tutti.state import Held, Named, Piece, Values, name_of, order_of, whole_piece

PREFIX: Final = "optimizer"
"""The first word of the names."""


def add_whole(held: Held, name: str, kept: Mapping[str, Any]) -> None:
    """Add what an optimizer keeps for a whole parameter.

    Args:
        held: gets it.
        name: of the parameter.
        kept: `optimizer.state[parameter]`.
    """
    for key, value in kept.items():
        if isinstance(value, Tensor):
            held.pieces.append(whole_piece(name_of(PREFIX, name, key), value))
        else:
            held.numbers[name_of(PREFIX, name, key)] = value


def add_stretch(
    held: Held,
    name: str,
    parameter: nn.Parameter,
    elements: slice,
    at: int,
    kept: Mapping[str, Any],
    counters: Iterable[str],
) -> None:
    """Add what an elementwise optimizer keeps for a stretch that some elements of a parameter are a part of.

    Args:
        held: gets it.
        name: of the parameter.
        parameter: the model's own.
        elements: which of its elements, in the order of memory.
        at: where the first of them lies in the stretch.
        kept: the optimizer's state for the stretch.
        counters: the keys of `kept` that are kept once for a parameter.
    """
    for key, value in kept.items():
        full = name_of(PREFIX, name, key)
        if not isinstance(value, Tensor):
            held.numbers[full] = value
        elif key in counters:
            held.pieces.append(whole_piece(full, value))
        else:
            values = value.detach()[at : at + elements.stop - elements.start]
            held.pieces.append(
                Piece(full, elements.start, values, tuple(parameter.shape), order_of(parameter))
            )


def options_of(optimizer: Optimizer) -> list[Values]:
    """Return the options of all param groups, such as learning rates, without the parameters."""
    return [
        {name: value for name, value in group.items() if name not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def load(optimizer: Optimizer, names: Mapping[nn.Parameter, str], held: Named, options: list[Values]) -> None:
    """Give an optimizer the state of another one, and the options of its param groups.

    Args:
        optimizer: new, over parameters of the model.
        names: of these parameters.
        held: has the state, as `add_whole` and `add_stretch` have added it. The tensors are not copied.
        options: of the other's param groups, as `options_of` has returned them.

    Raises:
        BadCheckpoint: the param groups are others.
    """
    if len(options) != len(optimizer.param_groups):
        raise BadCheckpoint(
            f"the optimizer has {len(optimizer.param_groups)} param groups, and {len(options)} in the "
            "checkpoint; resume with the optimizer that the checkpoint was made with"
        )
    by_parameter: dict[str, dict[str, Any]] = {}
    for full, value in [*held.numbers.items(), *held.tensors.items()]:
        prefix, _, rest = full.partition("/")
        name, _, key = rest.rpartition("/")
        if prefix == PREFIX:
            by_parameter.setdefault(name, {})[key] = value
    for group, other in zip(optimizer.param_groups, options, strict=True):
        for parameter in group["params"]:
            if kept := by_parameter.get(names.get(parameter, "")):
                optimizer.state[parameter] = kept
        for name, value in other.items():
            group[name] = tuple(value) if isinstance(group.get(name), tuple) else value
