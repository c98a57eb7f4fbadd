"""Python objects instead of names: their names in the configuration, and their way to the ranks."""

from __future__ import annotations

import os
from collections import ChainMap
from pickle import PickleBuffer
from typing import Any, ClassVar

import cloudpickle
import numpy as np
import torch

from tutti.errors import BadOption
from tutti.run.config import OBJECT
from tutti.run.pickled import Pickled
from tutti.strategies import STRATEGIES, Strategy


def _memory(storage: torch.UntypedStorage, dtype: torch.dtype) -> torch.TypedStorage:
    # Torch gives its own constructor no types.
    return torch.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]


def _pickled_memory(memory: torch.TypedStorage) -> tuple[Any, tuple[torch.UntypedStorage, torch.dtype]]:
    return _memory, (memory._untyped_storage, memory.dtype)


def _pickled_bytes(storage: torch.UntypedStorage) -> tuple[Any, tuple[PickleBuffer, torch.device]]:
    content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    return _of_bytes, (PickleBuffer(content.cpu().numpy().data), storage.device)


def _of_bytes(content: bytes | bytearray | memoryview, device: torch.device) -> torch.UntypedStorage:
    # A copy of torch's own memory: models may resize it.
    made = torch.empty(len(content), dtype=torch.uint8)
    made.numpy()[:] = np.frombuffer(content, np.uint8)
    return made.to(device).untyped_storage()


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles the memory of tensors once, even if several share it; torch would pickle it for each."""

    dispatch_table: ClassVar = ChainMap(
        {torch.UntypedStorage: _pickled_bytes, torch.TypedStorage: _pickled_memory},
        cloudpickle.Pickler.dispatch_table,
    )


def by_name(given: dict[str, object]) -> tuple[dict[str, Any], dict[str, Pickled]]:
    """Turn the caller's Python arguments into values for a configuration.

    Return values for a `TrainConfig`, and, pickled, the objects that names alone do not bring to the ranks. A
    built-in strategy goes by its name and hyper-parameters, a class by its name if that finds it.
    """
    values: dict[str, Any] = {}
    objects: dict[str, Pickled] = {}
    for field, value in given.items():
        if isinstance(value, Strategy) and type(value) is STRATEGIES.get(value.name):
            values |= {field: value.name, "strategy_options": value.options()}
        elif value is None or isinstance(value, str):
            values[field] = value
        elif isinstance(value, os.PathLike):
            values[field] = os.fspath(value)
        else:
            values[field] = name_of(value, field)
            if not isinstance(value, type) or values[field].startswith(OBJECT):
                objects[field] = _pickled(field, value)
    return values, objects


def name_of(value: object, field: str = "") -> str:
    """Name an object for the configuration: package.module:name if that is enough to repeat the run."""
    if isinstance(value, str):
        return value
    if (
        isinstance(value, list | tuple)
        and value
        and (field == "callbacks" or all(isinstance(item, str) or callable(item) for item in value))
    ):
        return ",".join(name_of(item) for item in value)
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    by_class = field in ("optimizer", "schedule") and not isinstance(value, type)
    known = isinstance(module, str) and module != "__main__" and isinstance(name, str) and "<" not in name
    if known and not by_class:
        return f"{module}:{name}"
    return OBJECT + (name if isinstance(name, str) else type(value).__name__)


def _pickled(field: str, value: object) -> Pickled:
    try:
        return Pickled.of(value, _Pickler)
    except Exception as error:
        raise BadOption(
            f"{field} cannot be sent to the ranks ({type(error).__name__}: {error}); "
            f"give a function that makes it instead"
        ) from error
