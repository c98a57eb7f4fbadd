"""The extra states of modules (`get_extra_state`), and the random generators of a process.

A module's state is torch's `state_dict`: parameters, buffers and extra states. Plain attributes, such as a
counter, stay with each rank.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from tutti.comm.base import Communicator
from tutti.object_state import as_values, from_values
from tutti.state import Values


class ModuleState:
    """The extra states of a model's modules."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def extra(self) -> Values:
        """Return the extra states of the modules by name; the tensors are live."""
        return {
            name: as_values(one.get_extra_state(), f"the extra state of '{name}'")
            for name, one in self._with_extra_state()
        }

    def load_extra(self, values: Values) -> None:
        """Set the extra states of modules by name."""
        for name, one in self._with_extra_state():
            if name in values:
                one.set_extra_state(from_values(values[name]))

    def share_extra(self, comm: Communicator) -> None:
        """Give the modules of all ranks rank 0's extra states (collective)."""
        modules = [one for _, one in self._with_extra_state()]
        if comm.size == 1 or not modules:
            return
        own = [one.get_extra_state() for one in modules] if comm.rank == 0 else None
        states = cast("list[Any]", comm.broadcast_object(own))
        if comm.rank > 0:
            for one, state in zip(modules, states, strict=True):
                one.set_extra_state(state)

    def _with_extra_state(self) -> Iterator[tuple[str, nn.Module]]:
        for name, one in self._module.named_modules():
            if _gives_extra_state(one):
                yield name, one


def _gives_extra_state(module: nn.Module) -> bool:
    return type(module).get_extra_state is not nn.Module.get_extra_state


def random_state() -> Values:
    """Return the states of this process's generators."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    version, words, gauss = random.getstate()
    return {
        "torch": torch.get_rng_state(),
        "numpy": [kind, torch.from_numpy(np.array(keys, dtype=np.int64)), *rest],
        "python": [version, list(words), gauss],
    }


def load_random_state(values: Values) -> None:
    """Set this process's generators to earlier states."""
    torch.set_rng_state(values["torch"].clone())
    kind, keys, *rest = values["numpy"]
    numpy: tuple[Any, ...] = (kind, keys.numpy().astype(np.uint32), *rest)
    np.random.set_state(numpy)
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words), gauss))
