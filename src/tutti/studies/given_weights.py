"""The first weights of modules that a farm was given as Python objects, kept in its folder.

    FARM/given/model-lenet.safetensors

A script that goes on with the farm makes such a module anew, with other random numbers. What has finished
began with the weights that are kept here, so what is left does, too. Imports torch, as who gave them has.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import cloudpickle
import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tutti.errors import BadModel
from tutti.records.files import make_file, refusing
from tutti.run.pickled import Pickled
from tutti.training.weights import load_weights, weights_to_bytes

GIVEN: Final = "given"
"""The folder of these weights, in that of the farm."""

_DIGITS: Final = 12


def numbers_given(objects: Mapping[str, Pickled]) -> dict[str, str]:
    """Describe the modules and arrays among objects, as fields of a farm's question, by their numbers.

    Args:
        objects: pickled, by what they are called.
    """
    loaded = {name: pickled.load() for name, pickled in objects.items()}
    modules = {f"given {name}": _described(one) for name, one in loaded.items() if isinstance(one, nn.Module)}
    arrays = {name: one for name, one in loaded.items() if isinstance(one, np.ndarray)}
    return modules | {
        f"given {name}": f"array {hashlib.sha256(one.tobytes()).hexdigest()[:_DIGITS]}"
        for name, one in arrays.items()
    }


def keep_weights(farm: Path, objects: Mapping[str, Pickled]) -> None:
    """Keep the weights of the modules among objects, unless they are there.

    Args:
        farm: its folder.
        objects: pickled, by what they are called, such as "model lenet".

    Raises:
        BadRunFolder: they cannot be written.
    """
    for name, pickled in objects.items():
        module, file = _module(pickled), _file(farm, name)
        if module is not None and not file.is_file():
            with refusing(file):
                file.parent.mkdir(exist_ok=True)
                make_file(file, weights_to_bytes(module.state_dict()))


def with_kept_weights(farm: Path, name: str, pickled: Pickled) -> Pickled:
    """Return an object with the weights that the farm was begun with, if it is such a module.

    Another module stays as it is: whoever compares what the farm was given will refuse it.

    Args:
        farm: its folder.
        name: as for `keep_weights`.
        pickled: the object.

    Raises:
        BadRunFolder: the weights cannot be read.
    """
    module, file = _module(pickled), _file(farm, name)
    if module is None or not file.is_file():
        return pickled
    try:
        load_weights(module, file)
    except BadModel:
        return pickled
    begun = Pickled.of(module, cloudpickle.Pickler)
    if numbers_given({name: begun}) == numbers_given({name: pickled}):
        return pickled
    print(
        f"tutti: warning: the given {name} has other first weights than {farm} was begun with: it goes on "
        "with those; for the new ones name another folder with out",
        file=sys.stderr,
        flush=True,
    )
    return begun


def _module(pickled: Pickled) -> nn.Module | None:
    """Return the module that was pickled, if it is one whose state is plain tensors."""
    found: object = pickled.load()
    if not isinstance(found, nn.Module) or not all(map(_is_plain, found.state_dict().values())):
        return None
    return found


def _is_plain(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and not is_lazy(value)
        and not (value.is_meta or value.is_quantized)
        and value.layout == torch.strided
    )


def _file(farm: Path, name: str) -> Path:
    return farm / GIVEN / f"{name.replace(' ', '-')}.safetensors"


def _described(module: nn.Module) -> str:
    found = hashlib.sha256()
    for name, part in module.named_modules():
        # What a user's class says of itself may be another text in each process.
        said = part.extra_repr() if _of_torch(type(part)) else ""
        found.update(repr((name, type(part).__qualname__, said)).encode())
    for name, tensor in module.state_dict().items():
        if not isinstance(tensor, torch.Tensor) or is_lazy(tensor) or tensor.is_meta:
            continue
        if tensor.is_quantized or tensor.layout is not torch.strided:
            continue  # It has no plain bytes.
        found.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"{type(module).__name__} with weights {found.hexdigest()[:_DIGITS]}"


def _of_torch(kind: type) -> bool:
    return kind.__module__.partition(".")[0] == "torch"
