"""The numbers of modules and arrays that a farm was given as Python objects. Imports torch."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from tutti.run.pickled import Pickled

_DIGITS: Final = 12


def numbers_given(objects: Mapping[str, Pickled]) -> dict[str, str]:
    """Describe the modules and arrays among objects, as fields of a farm's question, by their numbers.

    Args:
        objects: pickled, by what they are called, such as "model lenet".
    """
    found = {}
    for name, pickled in objects.items():
        loaded: object = pickled.load()
        if isinstance(loaded, nn.Module):
            found[f"given {name}"] = _described(loaded)
        elif isinstance(loaded, np.ndarray):
            found[f"given {name}"] = f"array {hashlib.sha256(loaded.tobytes()).hexdigest()[:_DIGITS]}"
    return found


def _described(module: nn.Module) -> str:
    found = hashlib.sha256()
    for name, part in module.named_modules():
        # The text of a user's class may differ from process to process.
        told = part.extra_repr() if type(part).__module__.partition(".")[0] == "torch" else ""
        found.update(repr((name, type(part).__qualname__, told)).encode())
    for name, tensor in module.state_dict().items():
        if not isinstance(tensor, Tensor) or is_lazy(tensor) or tensor.is_meta:
            continue
        if tensor.is_quantized or tensor.layout is not torch.strided:
            continue  # It has no plain bytes.
        found.update(repr((name, tensor.dtype, tuple(tensor.shape))).encode())
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return f"{type(module).__name__} with weights {found.hexdigest()[:_DIGITS]}"
