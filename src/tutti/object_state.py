"""The state of objects of others, such as schedulers, as values that a checkpoint can have."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Mapping
from typing import Any, Final, get_args

import numpy as np
import torch
from torch import Tensor

from tutti.errors import BadOption

_OfNumpy = np.random.Generator | np.random.BitGenerator | np.random.SeedSequence | np.random.RandomState
_Random = _OfNumpy | random.Random
RANDOM: Final = (torch.Generator, *get_args(_Random))
"""The generators of random numbers, and the seeds that NumPy's spawn from."""

_PAIRS: Final = "/pairs"
"""The only key of a dictionary that stands for one whose keys are no texts."""


def as_values(value: object, path: str) -> Any:
    """Return a tree of values that a checkpoint can have.

    Args:
        value: None, truth values, numbers, texts, tensors, and lists, tuples and dictionaries of them.
        path: what it is, for messages.

    Raises:
        BadOption: something in it is something else.
    """
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
    """Return what `as_values` was given.

    Args:
        values: its result; tensors are copied.
        like: a value of the same form: lists and dictionaries become what they are there, such as tuples.
    """
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
    """Tell whether an object has a state of its own, as modules, optimizers and schedulers of torch have."""
    return all(callable(getattr(thing, name, None)) for name in ("state_dict", "load_state_dict"))


def state_of(thing: Any, name: str) -> Any:
    """Return the state of an object as values."""
    if isinstance(thing, torch.Generator):
        return thing.get_state()
    if isinstance(thing, _Random):
        return json.dumps(_numbers(thing), default=np.ndarray.tolist)
    return as_values(thing.state_dict(), f"the state of '{name}'")


def load_state_of(thing: Any, values: Any) -> None:
    """Give an object the state that `state_of` has returned."""
    if isinstance(thing, torch.Generator):
        thing.set_state(values.clone())
        return
    if isinstance(thing, _Random):
        _set_numbers(thing, json.loads(values))
        return
    like = thing.state_dict()
    if values or like:  # one that is disabled has none, and takes none
        thing.load_state_dict(from_values(values, like))


def new_generator(kind: str, values: Any) -> Any:
    """Return a new generator with the state that `state_of` has returned of one of this very class.

    Args:
        kind: the name of the class.
        values: its state.
    """
    if kind == "torch":
        made: Any = torch.Generator()
    elif kind == "Random":
        made = random.Random()
    elif kind == "RandomState":
        made = np.random.RandomState()
    elif kind == "SeedSequence":
        return np.random.SeedSequence(**json.loads(values))
    else:
        bits = json.loads(values)["bits"]["bit_generator"]
        made = getattr(np.random, bits)()
        made = np.random.Generator(made) if kind == "Generator" else made
    load_state_of(made, values)
    return made


def kind_of(thing: Any) -> str | None:
    """Return for a generator what `new_generator` makes one like it of; None: it is of another class."""
    if type(thing) is torch.Generator:
        return "torch" if thing.device.type == "cpu" else None
    bits = thing.bit_generator if type(thing) is np.random.Generator else thing
    if isinstance(bits, np.random.BitGenerator) and getattr(np.random, type(bits).__name__, None) is not type(
        bits
    ):
        return None
    plain = (np.random.Generator, np.random.RandomState, np.random.SeedSequence, random.Random)
    if type(thing) in plain:
        return type(thing).__name__
    return type(thing).__name__ if isinstance(thing, np.random.BitGenerator) else None


def _numbers(thing: _Random) -> Any:
    """Return the state of a generator, of numbers, lists and dictionaries; integers have up to 128 bits."""
    if isinstance(thing, np.random.Generator):
        thing = thing.bit_generator
    if isinstance(thing, np.random.BitGenerator):
        seed = thing.seed_seq
        return {"bits": thing.state, "seed": seed.state if type(seed) is np.random.SeedSequence else None}
    if isinstance(thing, np.random.SeedSequence):
        return thing.state
    return thing.getstate() if isinstance(thing, random.Random) else thing.get_state(legacy=False)


def _set_numbers(thing: _Random, numbers: Any) -> None:
    if isinstance(thing, np.random.Generator):
        thing = thing.bit_generator
    if isinstance(thing, np.random.BitGenerator):
        bits, seed = (numbers["bits"], numbers["seed"]) if "bits" in numbers else (numbers, None)
        if seed is not None and not _is_advanced(thing.seed_seq, seed):
            # As when it is unpickled: nothing else gives it another seed to spawn from.
            thing.__setstate__((bits, np.random.SeedSequence(**seed)))  # type: ignore[attr-defined]
        thing.state = bits
    elif isinstance(thing, np.random.SeedSequence):
        if not _is_advanced(thing, numbers):
            raise BadOption("a seed has spawned more already than the one that it is to go on from")
    elif isinstance(thing, random.Random):
        version, words, gauss = numbers
        thing.setstate((version, tuple(words), gauss))
    else:
        thing.set_state(numbers)


def _is_advanced(seed: Any, numbers: Any) -> bool:
    """Have a seed spawn as many as another of the same numbers has; False: it is another one, or has more."""
    if type(seed) is not np.random.SeedSequence:
        return False
    now, then = ({**json.loads(json.dumps(one, default=np.ndarray.tolist))} for one in (seed.state, numbers))
    missing = then.pop("n_children_spawned") - now.pop("n_children_spawned")
    if now != then or missing < 0:
        return False
    if missing:
        seed.spawn(missing)
    return True
