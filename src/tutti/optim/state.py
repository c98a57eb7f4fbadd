"""An optimizer's state by the names of the model's parameters, as it is written into checkpoints.

optimizer/0.weight/exp_avg       a tensor in the parameter's shape; each rank may have a piece
optimizer/0.weight/step          a counter of the parameter, or a tensor of another shape: whole
optimizer//calls                 an entry of `optimizer.state` under a name, as optimizers of users have them
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from copy import deepcopy
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.errors import BadCheckpoint
from tutti.optim.parameterwise import is_parameterwise
from tutti.state import LocalState, Named, Saved, TensorPiece, Values, name_of, order_of, whole_piece

PREFIX: Final = "optimizer"
"""The first word of the names."""

_UNNAMED: Final = "/"
"""No name of a parameter."""


def held_by(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> LocalState:
    """Return the `state` of an optimizer that is itself stepped, for the parameters that have names."""
    held = LocalState()
    state: Mapping[Any, Any] = optimizer.state
    for key, value in state.items():
        if isinstance(key, nn.Parameter):
            if key in names:
                add_whole(held, names[key], value)
        else:
            add_whole(held, "", {str(key): value})
    return held


def add_whole(held: LocalState, name: str, kept: Mapping[str, Any]) -> None:
    """Add an optimizer's state of a whole parameter of this name."""
    for key, value in kept.items():
        if isinstance(value, Tensor):
            held.pieces.append(whole_piece(name_of(PREFIX, name, key), value))
        else:
            held.numbers[name_of(PREFIX, name, key)] = value


def add_slice(
    held: LocalState,
    name: str,
    parameter: nn.Parameter,
    elements: slice,
    kept: Mapping[str, Any],
    counters: Iterable[str],
) -> None:
    """Add an elementwise optimizer's state of some elements of a parameter, in the order of memory.

    The tensors in `kept` may be longer; those under `counters` are of the whole parameter.
    """
    for key, value in kept.items():
        full = name_of(PREFIX, name, key)
        if not isinstance(value, Tensor):
            held.numbers[full] = value
        elif key in counters:
            held.pieces.append(whole_piece(full, value))
        else:
            values = value.detach()[: elements.stop - elements.start]
            held.pieces.append(
                TensorPiece(full, elements.start, values, tuple(parameter.shape), order_of(parameter))
            )


def options_of(optimizer: Optimizer) -> list[Values]:
    """Return the options of all param groups, such as learning rates, without the parameters."""
    return [
        {name: value for name, value in group.items() if name not in ("params", "param_names")}
        for group in optimizer.param_groups
    ]


def names_in_groups(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> list[list[str]]:
    """Return the names of the parameters of each param group."""
    return [[names[p] for p in group["params"] if p in names] for group in optimizer.param_groups]


@torch.no_grad()
def load(
    optimizer: Optimizer,
    names: Mapping[nn.Parameter, str],
    saved: Saved,
    options: list[Values],
    copy: bool = False,
) -> None:
    """Load the saved state of another optimizer, and the options of its param groups.

    With `copy`, and if it may combine parameters, the optimizer is itself stepped and gets its own tensors;
    otherwise the state is cut into slices later. BadCheckpoint: the param groups differ.
    """
    if len(options) != len(optimizer.param_groups):
        raise BadCheckpoint(
            f"the optimizer has {len(optimizer.param_groups)} param groups, and {len(options)} in the "
            "checkpoint; resume with the optimizer that the checkpoint was made with"
        )
    state: MutableMapping[Any, Any] = optimizer.state
    kept_by_name = by_name([saved.joint] if saved.alone is None else [saved.joint, saved.alone])
    if copy or not is_parameterwise(optimizer):
        kept_by_name = deepcopy(kept_by_name)
    for group, other in zip(optimizer.param_groups, options, strict=True):
        for parameter in group["params"]:
            if kept := kept_by_name.get(names.get(parameter, _UNNAMED)):
                before = saved.joint.tensors.get(f"weights/{names[parameter]}", parameter).dtype
                state[parameter] = {
                    key: _placed(key, value, parameter, group, before) for key, value in kept.items()
                }
        for name, value in other.items():
            group[name] = in_form_of(group.get(name), value)
    state.update(kept_by_name.get("", {}))


def by_name(held: Iterable[Named]) -> dict[str, dict[str, Any]]:
    """Return an optimizer's state of each parameter, by its name; later ones take precedence."""
    states: dict[str, dict[str, Any]] = {}
    for one in held:
        for full, value in [*one.numbers.items(), *one.tensors.items()]:
            prefix, _, rest = full.partition("/")
            name, _, key = rest.rpartition("/")
            if prefix == PREFIX:
                states.setdefault(name, {})[key] = value
    return states


def _placed(
    key: str, value: Any, parameter: nn.Parameter, group: Mapping[str, Any], before: torch.dtype
) -> Any:
    """Return a value of the state as the optimizer wants it.

    Counters usually stay on the CPU. What had the dtype of the parameter, `before`, has it again.
    """
    if not isinstance(value, Tensor):
        return value
    if key != "step" and value.dtype == before:
        value = value.to(parameter.dtype)
    if value.shape == parameter.shape and value.stride() != parameter.stride():
        # Fused kernels run over the memory of both.
        return torch.empty_like(parameter, dtype=value.dtype).copy_(value)
    there = key != "step" or group.get("capturable") or group.get("fused")
    return value.to(parameter.device) if there else value


def in_form_of(before: Any, value: Any) -> Any:
    """Return an option in the form that it has in this optimizer; a tensor keeps its identity."""
    if isinstance(before, Tensor):
        return before.copy_(torch.as_tensor(value))
    return tuple(value) if isinstance(before, tuple) else deepcopy(value)
