"""The steps of the user's optimizer, on each rank, by gradients that are the same on all of them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from operator import is_
from pathlib import Path
from types import MethodType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tutti.errors import BadOption
from tutti.optim.state import held_by, load
from tutti.own_loop.divided_optimizer import DividedOptimizer
from tutti.own_loop.loop import LoopBatches
from tutti.own_loop.meetings import Purpose
from tutti.replica import Replica
from tutti.state import LocalState, Saved, Values

Closure = Callable[[], Tensor]
"""Recomputes the loss and its gradients, as for torch's optimizers."""

NUMBERS: Final = (int, float, tuple, Tensor)
"""Types of options that the ranks compare."""


class Stepper:
    """The steps of one optimizer, whose `step` it replaces; `number` is its place among the loop's."""

    def __init__(
        self,
        replica: Replica,
        optimizer: Optimizer,
        copies: list[list[Tensor]],
        loop: LoopBatches,
        number: int,
    ) -> None:
        self.replica, self.optimizer, self.copies, self._loop = replica, optimizer, copies, loop
        self._number, self._fits = number, False
        gradients = [flat.grads for flat in replica.flats]
        self._divided = DividedOptimizer(optimizer, replica, copies, gradients, loop.comm.node)
        self._listed: list[nn.Parameter] = []
        native = optimizer.step

        def step(optimizer: Optimizer, closure: Closure | None = None) -> object:
            optimizer._opt_called = True  # type: ignore[attr-defined]
            loss = self._step(native, closure)
            loop.note_step()
            return loss

        # A scheduler that was made before warns of an optimizer whose step lacks its mark.
        step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        optimizer.step = MethodType(step, optimizer)  # type: ignore[method-assign]

    def _step(self, native: Callable[..., Any], closure: Closure | None) -> Any:
        if self._loop.comm.size > 1:
            self._meet(native)
        evaluate = None if closure is None else lambda: self._evaluate(closure)
        if self._fits:
            loss = None if evaluate is None else evaluate()  # these optimizers want it once, at the beginning
            self._divided.step()
            return loss
        self._divided.release()
        return native() if evaluate is None else native(evaluate)

    def _evaluate(self, closure: Closure) -> Tensor:
        before = len(self._loop.unstepped)
        with torch.enable_grad():
            loss = closure()
        # An optimizer that looks at the loss must see the same on all ranks.
        if self._loop.comm.size == 1 or loss is None:
            return loss
        return self._loop.whole_loss(loss, self._loop.unstepped[before:])

    def _meet(self, native: Callable[..., Any]) -> None:
        """Meet the other ranks before a step, and decide whether it is divided (collective)."""
        exchange = self._loop.exchange
        exchange.refuse_step_inside()
        self._refuse_strangers()
        fits = self._divided.fits(native)
        if fits:
            self._divided.bring_weights()
        changed = self._divided.changed()
        words = self._number, _hash_of(self.optimizer), int(changed), int(fits)
        table = exchange.meetings.come(Purpose.STEP, *words)
        exchange.meetings.steps += 1
        if table is not None:
            self._refuse_difference(table)
            fits = bool(table[:, 3].all())
        self._fits = fits
        if fits and changed:
            self._divided.adopt()

    def _refuse_strangers(self) -> None:
        """Refuse new parameters that no model has: the ranks would not exchange them."""
        listed = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if len(listed) == len(self._listed) and all(map(is_, listed, self._listed)):
            return
        for parameter in listed:
            if parameter.requires_grad and not self._loop.exchange.knows(parameter):
                raise BadOption(
                    f"the optimizer has a parameter of shape {tuple(parameter.shape)} that no model had when "
                    "distribute() was given it; make the model whole, and load weights with assign=True, "
                    "before distribute(), and give it one module of the model and of the loss's parameters"
                )
        self._listed = listed

    def _refuse_difference(self, table: Tensor) -> None:
        """Refuse a step at which the ranks differ, and name the difference (collective)."""
        names = "optimizer, in the order of distribute()", "options", "loaded or changed its state"
        for column, name in enumerate(names):
            if bool((table[:, column] != table[0, column]).any()):
                values: list[Any] = table[:, column].tolist()
                if name == "options":
                    values = self._loop.comm.all_gather_objects(_options_of(self.optimizer))
                raise BadOption(
                    f"the ranks differ at optimizer.step() in the {name}: by rank, {values}; let all ranks "
                    "do the same: a scheduler that is given a loss needs scheduler.step(tutti.mean(loss))"
                )

    def state(self) -> LocalState:
        """Return this rank's part of the optimizer's state."""
        comm, names = self._loop.comm, names_in(self.replica.module)
        # State that belongs to no parameter is the same on all ranks.
        return held_by(self.optimizer, {p: names[p] for p in own_parameters(names, comm.rank, comm.size)})

    def load_state(self, saved: Saved, options: list[Values]) -> None:
        """Continue from the optimizer state and the options of earlier steps; the model has its weights."""
        self.optimizer.state = defaultdict(dict)
        load(self.optimizer, names_in(self.replica.module), saved, options, copy=True)


@dataclass
class OwnLoop(LoopBatches):
    """The state of a user's loop."""

    steppers: list[Stepper] = field(default_factory=list)  # one for each optimizer
    folders: dict[Path, Callable[[], None]] = field(default_factory=dict)  # each ends a folder's use


def names_in(module: nn.Module) -> dict[nn.Parameter, str]:
    """Return the names of a model's parameters."""
    return {parameter: name for name, parameter in module.named_parameters()}


def own_parameters(parameters: Iterable[nn.Parameter], rank: int, ranks: int) -> Iterator[nn.Parameter]:
    """Yield the parameters of a model that a rank saves for all: about the same bytes on every rank."""
    known = list(parameters)
    size, at = sum(parameter.nbytes for parameter in known), 0
    for parameter in known:
        if at * ranks // max(1, size) == rank:
            yield parameter
        at += parameter.nbytes


def _options_of(optimizer: Optimizer) -> list[object]:
    """Return the numbers among the optimizer's options."""
    groups = optimizer.param_groups
    return [(k, _numbers_in(v)) for group in groups for k, v in group.items() if isinstance(v, NUMBERS)]


def _numbers_in(value: object) -> object:
    """Return a value with numbers in place of tensors, which processes can compare."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else tuple(value.flatten().tolist())
    return tuple(map(_numbers_in, value)) if isinstance(value, tuple) else value


def _hash_of(optimizer: Optimizer) -> int:
    """Return a hash of the optimizer's options, the same in every process."""
    values = [value for group in optimizer.param_groups for value in group.values()]
    return hash(tuple([_numbers_in(value) for value in values if isinstance(value, NUMBERS)]))
