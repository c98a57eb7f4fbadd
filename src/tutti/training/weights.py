"""A module's weights as the bytes of a safetensors file, and back."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Final

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tutti.errors import BadModel, BadRunFolder
from tutti.records.json_lines import decode

_ENDS: Final = re.compile(r"_\d+(?=[/.]|$)")
"""The numbers that Keras appends to automatic names."""

TIED = "tied"
"""The entry of the file's metadata with the names of tensors stored under another name."""


def weights_to_bytes(state: Mapping[str, object]) -> bytes:
    """Return a module's `state_dict` as a safetensors file; tied weights are stored once."""
    stored: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, tensor in state.items():
        tensor = _storable(name, tensor)
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if tensor.numel() and first.setdefault(place, name) != name:
            tied[name] = first[place]
        else:
            stored[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return safetensors.torch.save(stored, metadata={TIED: json.dumps(tied)})


def refuse_unstorable(module: nn.Module) -> None:
    """Raise BadModel if the state of a module has a value that is no tensor."""
    for name, value in module.state_dict().items():
        _storable(name, value)


def _storable(name: str, value: object) -> Tensor:
    if not isinstance(value, Tensor):
        raise BadModel(
            f"the model's state '{name}' is a {type(value).__name__}; only tensors can be stored: have "
            "get_extra_state() return one, or tutti.train() write no run folder (out=None)"
        )
    return value


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file; tied ones are one tensor under several names."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
            tied = decode(dict[str, str], json.loads((file.metadata() or {}).get(TIED, "{}")))
        return tensors | {name: tensors[other] for name, other in tied.items()}
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise BadRunFolder(f"cannot read the weights in {path}: {error}; train the model again") from error


def load_weights(module: nn.Module, path: Path) -> None:
    """Set the parameters and buffers of `module`, in place, to those of a safetensors file."""
    set_weights(module, read_weights(path), path)


def set_weights(module: nn.Module, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Set the parameters and buffers of `module`, in place, to the tensors read from `path`."""
    try:
        module.load_state_dict(tensors)
    except RuntimeError as error:
        raise BadModel(
            f"the weights in {path} belong to another model: {error}; build the model as it was trained "
            "(config.json beside the weights says how)"
        ) from error


def names_in_state(module: nn.Module) -> dict[str, str]:
    """Return the names in a module's `state_dict`, with the first name of each parameter or buffer."""
    first = {id(tensor): name for name, tensor in chain(module.named_parameters(), module.named_buffers())}
    held = {name: id(value) for name, value in module.state_dict(keep_vars=True).items()}
    return {name: first[key] for name, key in held.items() if key in first}


def bring_back(weights: Mapping[str, Tensor], module: nn.Module) -> None:
    """Set the parameters and buffers of `module` to those of a trained copy of it.

    The copy may have other names: a pickled Keras model loses the names of models and wrappers
    (`sequential/dense/kernel` becomes `dense/kernel`), and gets other automatic numbers (`seed_generator_2`).
    Otherwise they are matched by their order.
    """
    own = module.state_dict()
    if own.keys() != weights.keys():
        ways = _by_name(own, weights), dict(zip(weights, own, strict=False))
        names = next((one for one in ways if _are_alike(one, own, weights)), None)
        if names is None:
            first = sorted(own.keys() ^ weights.keys())[0]
            raise BadModel(
                f"the model's copy on the ranks had other parameters than the model itself ('{first}'), "
                "which cannot be given the trained ones; give a function that makes the model instead"
            )
        weights = {names[other]: trained for other, trained in weights.items()}
    module.load_state_dict(weights)


def _by_name(own: Iterable[str], weights: Iterable[str]) -> dict[str, str]:
    """Match names that are equal except for numbers, in the order of the numbers."""
    there: dict[str, list[str]] = {}
    for other in sorted(weights, key=_numbers):
        there.setdefault(_ENDS.sub("", other), []).append(other)
    here: dict[str, list[str]] = {}
    for name in sorted(own, key=_numbers):
        kind = _ENDS.sub("", name)
        while kind not in there and "/" in kind:
            kind = re.sub(r"[^./]+/", "", kind, count=1)
        here.setdefault(kind, []).append(name)
    pairs = (zip(there[kind], names, strict=False) for kind, names in here.items() if kind in there)
    return dict(chain.from_iterable(pairs))


def _are_alike(names: Mapping[str, str], own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> bool:
    """Return whether each tensor of a copy has a counterpart of its name and shape in the module."""
    return len(own) == len(weights) == len(names) and all(
        _last(names[other]) == _last(other) and own[names[other]].shape == trained.shape
        for other, trained in weights.items()
    )


def _numbers(name: str) -> list[int]:
    """Return the numbers at the ends of the parts of a name."""
    return [int(number[1:]) for number in _ENDS.findall(name)]


def _last(name: str) -> str:
    """Return the last part of a name: kernel of sequential/dense/kernel."""
    return re.split(r"[./]", name)[-1]
