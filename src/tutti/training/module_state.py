"""What modules give in `get_extra_state`, and a warning of plain attributes that change while they train.

A module's state is what torch's `state_dict` has: parameters, buffers and extra states. Each rank has its own
plain attributes, such as a counter: no checkpoint, no other rank and no evaluation gets them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.comm.base import Communicator
from tutti.object_state import as_values, from_values
from tutti.optim.parameterwise import is_parameterwise
from tutti.state import Values
from tutti.terminal import warn_on_stderr
from tutti.training.callbacks import Callbacks
from tutti.training.evaluation import load_buffers, named_buffers

OF_TORCH: Final = frozenset(vars(nn.Module())) | {"_opt_called", "_step_count"}
"""The attributes that torch gives any module or optimizer."""


class ModuleState:
    """The extra states of a model's modules."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def extra(self) -> Values:
        """Return the extra state of each module that gives one, by name; the tensors are live."""
        return {
            name: as_values(one.get_extra_state(), f"the extra state of '{name}'")
            for name, one in self._with_extra_state()
        }

    def load_extra(self, values: Values) -> None:
        """Give the modules the extra states of others of the same names."""
        for name, one in self._with_extra_state():
            if name in values:
                one.set_extra_state(from_values(values[name]))

    def share_extra(self, comm: Communicator) -> None:
        """Give the modules of all ranks the extra states of rank 0's (collective)."""
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


class PlainAttributes:
    """The numbers, texts and tensors in attributes of a model and an optimizer that no state has."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        self._module, self._optimizer = module, optimizer
        self._first = dict(self._marks())

    def warning(self) -> str | None:
        """Return the warning of those that have changed since this was made; None: none has."""
        changed = [name for name, mark in self._marks() if self._first.get(name, mark) != mark]
        if not changed:
            return None
        shown = ", ".join(f"'{name}'" for name in changed[:3]) + (", ..." if len(changed) > 3 else "")
        return (
            f"training changes the attributes {shown}, which neither a checkpoint nor the trained model has. "
            "Make them buffers (register_buffer) or give them in get_extra_state(); in an optimizer, keep "
            "them in `state`"
        )

    def _marks(self) -> Iterator[tuple[str, object]]:
        """Yield the name of each attribute, with a value that tells whether it has changed."""
        for name, one in self._module.named_modules():
            if not _gives_extra_state(one):
                yield from _marks_of(one, f"{name}." if name else "")
        if not is_parameterwise(self._optimizer):
            yield from _marks_of(self._optimizer, f"{type(self._optimizer).__name__}.")


class Remembered:
    """What model, loss, optimizer and callbacks hold besides weights, the model's buffers and `state`."""

    def __init__(
        self, module: nn.Module, loss: object, optimizer: Optimizer, callbacks: Callbacks | None
    ) -> None:
        # Of a loss that is a function there is nothing to remember.
        self._loss = loss if isinstance(loss, nn.Module) else nn.Module()
        self._states = ModuleState(module), ModuleState(self._loss)
        self._attributes: PlainAttributes | None = PlainAttributes(module, optimizer)
        self._callbacks = callbacks

    def share(self, comm: Communicator) -> None:
        """Give all ranks rank 0's extra states (collective); warn, once, of attributes that no state has."""
        for state in self._states:
            state.share_extra(comm)
        if self._attributes is not None and (text := self._attributes.warning()) is not None:
            self._attributes = None
            if comm.rank == 0:
                warn_on_stderr(text)

    def state(self) -> Values:
        """Return the extra states of model and loss, the loss's buffers, and the states of callbacks.

        Raises:
            BadOption: one has something that no checkpoint can have.
        """
        return {
            "extra": [state.extra() for state in self._states],
            "buffers": named_buffers(self._loss),
            "callbacks": {} if self._callbacks is None else self._callbacks.state(),
        }

    def load_state(self, values: Values) -> None:
        """Go on from an earlier state."""
        for state, extra in zip(self._states, values["extra"], strict=True):
            state.load_extra(extra)
        load_buffers(self._loss, values["buffers"])
        if self._callbacks is not None:
            self._callbacks.load_state(values["callbacks"])


def _marks_of(owner: object, prefix: str) -> Iterator[tuple[str, object]]:
    parameters = vars(owner).get("_parameters", {})
    for attribute, value in vars(owner).items():
        if {f"{attribute}_orig", f"{attribute}_v"} & parameters.keys():
            continue  # torch.nn.utils computes a normalised or pruned weight in each pass
        if isinstance(value, Tensor):
            yield prefix + attribute, (value.data_ptr(), value._version)
        elif isinstance(value, Optimizer):
            yield prefix + attribute, bool(value.state)
        elif attribute not in OF_TORCH and isinstance(value, bool | int | float | str):
            yield prefix + attribute, value


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
    """Have this process's generators go on from earlier states."""
    torch.set_rng_state(values["torch"].clone())
    kind, keys, *rest = values["numpy"]
    numpy: tuple[Any, ...] = (kind, keys.numpy().astype(np.uint32), *rest)
    np.random.set_state(numpy)
    version, words, gauss = values["python"]
    random.setstate((version, tuple(words), gauss))
