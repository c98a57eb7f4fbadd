"""The state of foreign objects, such as schedulers, as values that a checkpoint can have."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from tutti.errors import BadOption

_PAIRS: Final = "/pairs"
"""The only key of a dictionary that stands for one with keys other than texts."""


def as_values(value: object, path: str) -> Any:
    """Return a tree of values that a checkpoint can have, or raise BadOption."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str | Tensor):
        return value
    if isinstance(value, list | tuple):
        return [as_values(item, f"{path}[{number}]") for number, item in enumerate(value)]
    if isinstance(value, Mapping):
        items = {key: as_values(item, f"{path}[{key!r}]") for key, item in value.items()}
        if all(isinstance(key, str) for key in items):
            return items
        return {_PAIRS: [[as_values(key, path), item] for key, item in items.items()]}
    raise BadOption(
        f"{path} is of type {type(value).__name__}, and a checkpoint can have None, truth values, numbers, "
        "texts, tensors, and lists, tuples and dictionaries of them; give others by an object with "
        "state_dict() and load_state_dict() that makes such values of them"
    )


def from_values(values: Any, like: object = None) -> Any:
    """Return what `as_values` was given."""
    if isinstance(values, Tensor):
        return values.clone()
    if isinstance(values, list):
        forms = like if isinstance(like, list | tuple) and len(like) == len(values) else [None] * len(values)
        items = [from_values(item, form) for item, form in zip(values, forms, strict=True)]
        return tuple(items) if isinstance(like, tuple) else items
    if isinstance(values, dict):
        pairs = values[_PAIRS] if values.keys() == {_PAIRS} else values.items()
        known = like if isinstance(like, Mapping) else {}
        found = {key: from_values(item, known.get(key)) for key, item in pairs}
        return Counter(found) if isinstance(like, Counter) else found
    return values


def has_state_dict(thing: Any) -> bool:
    """Return whether an object has a state, as torch's modules, optimizers and schedulers have."""
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def state_of(thing: Any, name: str) -> Any:
    """Return the state of an object as values; JSON for a random generator, whose integers have 128 bits."""
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    if isinstance(thing, np.random.Generator):
        return json.dumps(thing.bit_generator.state, default=np.ndarray.tolist)
    if isinstance(thing, random.Random):
        return json.dumps(thing.getstate())
    return as_values(thing.state_dict(), f"the state of '{name}'")


def load_state_of(thing: Any, values: Any) -> None:
    """Give an object the state that `state_of` returned."""
    if isinstance(thing, torch.Generator):
        thing.set_state(values.clone())
    elif isinstance(thing, np.random.Generator):
        thing.bit_generator.state = json.loads(values)
    elif isinstance(thing, random.Random):
        version, words, gauss = json.loads(values)
        thing.setstate((version, tuple(words), gauss))
    elif values or thing.state_dict():  # a disabled one has none and takes none
        thing.load_state_dict(from_values(values, thing.state_dict()))
