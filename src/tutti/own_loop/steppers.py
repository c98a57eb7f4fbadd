"""Steps of all ranks, made of the calls of a user's own loop."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.errors import BadOption, CallsDiffer, PeerLost
from tutti.optim.state import held_by, load
from tutti.own_loop.divided_optimizer import DividedOptimizer
from tutti.own_loop.loop import Closure, SampleCounts, Stepper
from tutti.own_loop.meetings import Purpose
from tutti.run.arguments import as_arguments
from tutti.state import Saved, State, Values
from tutti.strategies.base import Clip, Pace, Worker
from tutti.strategies.joint_gradients import JointGradients, node_sizes


@dataclass(eq=False)
class JointStepper(Stepper):
    """The optimizer's own steps, on each rank, by gradients that are the same on all of them.

    Attributes:
        clip: limits of the gradient.
        copies: for each of the replica's vectors of weights, those of all ranks of this host.
        gradients: a vector of gradients for each of them, for the optimizer.
        joint: makes the gradients those of all ranks.
    """

    clip: Clip
    copies: list[list[Tensor]]
    gradients: list[Tensor]
    joint: JointGradients

    def __post_init__(self) -> None:
        super().__post_init__()
        self._divided = DividedOptimizer(
            self.optimizer, self.replica, self.copies, self.gradients, self.loop.comm.node
        )
        self._fits, self._passes = False, 0
        self._listed: list[nn.Parameter] = []

    def is_of(self, model: nn.Module, optimizer: Optimizer) -> bool:
        """Return whether this stepper belongs to both."""
        return self.replica.module is model and self.optimizer is optimizer

    @override
    def step(self, native: Callable[..., Any], closure: Closure | None) -> Any:
        self._meet(native)
        if closure is not None:
            return self._divide(native, partial(self._evaluate, closure))
        if self.clip.norm is None and self.clip.value is None:
            return self._divide(native)
        with _unscaled(self.optimizer) as overflown:  # the limits are those of the gradient itself
            if overflown:
                return None
            self._limit()
            return self._divide(native)

    def _evaluate(self, closure: Closure) -> Tensor:
        before = len(self.loop.unstepped)
        loss = closure()
        self._limit()
        # An optimizer that looks at the loss must see the same on all ranks.
        if self.loop.comm.size == 1 or loss is None:
            return loss
        return self.loop.whole_loss(loss, self.loop.unstepped[before:], self.sums)

    def _divide(self, native: Callable[..., Any], closure: Closure | None = None) -> Any:
        """Step the optimizer, with the other ranks of the host if it allows that."""
        if not self._fits:
            self._divided.release()
            return native() if closure is None else native(closure)
        loss = _evaluate(closure)  # these optimizers want it once, at the beginning
        self._divided.step()
        return loss

    @override
    def settle(self, purpose: Purpose = Purpose.SETTLE) -> None:
        self.loop.exchange.meetings.come(purpose)

    @override
    def state(self) -> State:
        comm, names = self.loop.comm, names_in(self.replica.module)
        mine = {parameter: names[parameter] for parameter in own_parameters(names, comm.rank, comm.size)}
        held = self._divided.held(mine) if self._fits and not self._divided.changed() else None
        if held is None:  # state that belongs to no parameter is the same on all ranks
            held = held_by(self.optimizer, mine)
        return State(held, own={"reductions": self.joint.state(), "node_sizes": node_sizes(comm)})

    @override
    def load_state(self, saved: Saved, options: list[Values], same: bool) -> None:
        _load_optimizer(self, saved, options)
        self.joint.forget()
        if same and saved.own is not None and saved.own["node_sizes"] == node_sizes(self.loop.comm):
            self.joint.load_state(saved.own["reductions"])

    @override
    def finish(self) -> None:
        self.loop.exchange.meetings.come(Purpose.FINISH)

    def _meet(self, native: Callable[..., Any]) -> None:
        comm = self.loop.comm
        if comm.size == 1:
            return
        self._refuse_strangers()
        self._refuse_unseen()
        self._fits = self._divided.fits(native)
        if self._fits:
            self._divided.bring_weights()
        changed = self._divided.changed()
        exchange = self.loop.exchange
        details = (self._number, _hash_of(self.optimizer), int(changed), exchange.passes, int(self._fits))
        table = exchange.meet(Purpose.STEP, details)
        exchange.passes = 0
        exchange.meetings.steps += 1
        if len(table):
            _refuse_difference(table, self.optimizer, comm)
            self._fits = bool(table[:, 5].all())
        if self._fits and changed:
            self._divided.adopt()

    def _refuse_strangers(self) -> None:
        """Refuse new parameters of the optimizer that no model has: they are not exchanged."""
        listed = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        if len(listed) == len(self._listed) and all(map(is_, listed, self._listed)):
            return
        _refuse_strangers(
            self.optimizer,
            self.loop.exchange.knows,
            "no model had when distribute() was given it; make the model whole, and load weights with "
            "assign=True, before distribute(), and give it one module of the model and of such parameters as "
            "its loss has beside it",
        )
        self._listed = listed

    def _refuse_unseen(self) -> None:
        """Refuse gradients that the loop has set, with no backward pass since this optimizer's last step."""
        before, self._passes = self._passes, self.loop.exchange.made
        for cell in self.joint.unseen() if before == self._passes else ():
            if cell.parameter.grad is not None and bool(cell.parameter.grad.any()):
                raise BadOption(
                    f"the gradient of a parameter of shape {tuple(cell.parameter.shape)} was not made by "
                    "backward(), so it is this rank's alone; call torch.autograd.backward(parameters, "
                    "gradients) in place of setting parameter.grad"
                )

    def _limit(self) -> None:
        parameters = [p for p in self.replica.module.parameters() if p.grad is not None]
        if self.clip.value is not None:
            nn.utils.clip_grad_value_(parameters, self.clip.value)
        if self.clip.norm is not None:
            nn.utils.clip_grad_norm_(parameters, self.clip.norm)


@dataclass(eq=False)
class WorkerStepper(Stepper):
    """The steps of a strategy's worker, by this rank's own gradients.

    Between the steps the parameters' gradients are the user's: added up, zeroed and looked at as in torch.

    Attributes:
        clip: limits of the gradient.
        worker: this rank's.
    """

    clip: Clip
    worker: Worker

    def __post_init__(self) -> None:
        super().__post_init__()
        self._known = {parameter for flat in self.replica.flats for parameter in flat.parameters}
        self._inside = False
        self._refusal = (
            f"strategy '{self.strategy.name}' does not exchange: it was frozen, or not there, when "
            "distribute() was given the model; make the model whole and unfreeze it before, or use the "
            "default strategy, Sync()"
        )
        # A GradScaler calls `step` then, also where this rank's gradient has overflowed and others' have not.
        self.optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]

    @override
    def step(self, native: Callable[..., Any], closure: Closure | None) -> Any:
        if self._inside:  # the worker steps the user's optimizer itself
            return native() if closure is None else native(closure)
        loss = _evaluate(closure)
        self.steps += 1
        if self.loop.comm.size > 1:
            _refuse_strangers(self.optimizer, self._known.__contains__, self._refusal)
            self.loop.exchange.meetings.refuse_other_threads()
        self._meet(Purpose.STEP)
        with self._stepping(Purpose.STEP), _unscaled(self.optimizer) as overflown:
            if overflown:
                self.worker.skip()
            else:
                self._advance(self.loop.counts)
        self.loop.exchange.meetings.steps += 1
        return loss

    @override
    def settle(self, purpose: Purpose = Purpose.SETTLE) -> None:
        self._meet(purpose)
        with self.loop.exchange.meetings.explaining(purpose):
            self._compare_steps()
            self.worker.settle()

    @override
    def state(self) -> State:
        return self.worker.state()

    @override
    def load_state(self, saved: Saved, options: list[Values], same: bool) -> None:
        _load_optimizer(self, saved, options)
        with as_arguments(of_loop=True):
            self.worker = self.strategy.worker(self.replica, self.loop.comm, self.optimizer, self.clip)
        if same:
            self.worker.load_state(saved)

    @override
    def resume(self) -> None:
        self.worker.resume()

    @override
    def finish(self) -> None:
        self._meet(Purpose.FINISH)
        with self._stepping(Purpose.FINISH):
            self._compare_steps()
            self.worker.finish()

    def _meet(self, purpose: Purpose) -> None:
        """Meet the other ranks where they wait for each other anyway (collective); one may be elsewhere."""
        if self.strategy.pace is not Pace.TOGETHER or not self.worker.waits or self.loop.comm.size == 1:
            return
        table = self.loop.exchange.meet(purpose, (self._number,))
        if len(table):
            _refuse_other_optimizers(table)

    @contextmanager
    def _stepping(self, purpose: Purpose) -> Iterator[None]:
        self._inside = True
        try:
            with as_arguments(of_loop=True):
                yield
        except (PeerLost, CallsDiffer) as error:
            raise self.loop.exchange.meetings.explain(error, purpose) from None
        finally:
            self._inside = False

    def _advance(self, counts: SampleCounts) -> None:
        """Step by the parameters' gradients, weighted by this rank's samples."""
        share = counts.own / counts.all
        if self.sums or self.strategy.pace is not Pace.TOGETHER:  # or else it is of a batch of its own, whole
            share = float(counts.own > 0)
        with self.replica.lent_gradients():
            if share == 0:  # what this rank has computed is there only for `backward()`
                self.replica.zero_grad()
                for parameter in self._known:
                    parameter.grad = None
            elif share != 1:
                self.replica.gradients.scale(share)
            if self.strategy.pace is Pace.TOGETHER:
                self.worker.share = counts.own / counts.all
            self.worker.step()

    def _compare_steps(self) -> None:
        """Refuse that some ranks have made more steps than others, where they make them together."""
        if self.strategy.pace is not Pace.ABREAST or self.loop.comm.size == 1:
            return
        made = self.loop.comm.all_gather_objects(self.steps)
        if len(set(cast("list[int]", made))) > 1:
            raise BadOption(
                f"with strategy '{self.strategy.name}' all ranks make their steps at the same time, but by "
                f"rank they have made {made}; call optimizer.step() for every batch, on every rank"
            )


def names_in(module: nn.Module) -> dict[nn.Parameter, str]:
    """Return the names of a model's parameters."""
    return {parameter: name for name, parameter in module.named_parameters()}


def own_parameters(parameters: Iterable[nn.Parameter], rank: int, ranks: int) -> Iterator[nn.Parameter]:
    """Yield those of a model's parameters that a rank saves for all: about as many bytes as every other."""
    known = list(parameters)
    size, at = sum(parameter.nbytes for parameter in known), 0
    for parameter in known:
        if at * ranks // max(1, size) == rank:
            yield parameter
        at += parameter.nbytes


def _load_optimizer(stepper: Stepper, saved: Saved, options: list[Values]) -> None:
    """Give the user's optimizer the state of an earlier one, in place of its own."""
    stepper.optimizer.state = defaultdict(dict)
    load(stepper.optimizer, names_in(stepper.replica.module), saved, options, copy=True)


def _refuse_strangers(optimizer: Optimizer, knows: Callable[[nn.Parameter], bool], why: str) -> None:
    """Refuse parameters that have come to the optimizer later: the ranks do not exchange them."""
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad and not knows(parameter):
                raise BadOption(
                    f"param group {number} of the optimizer has a parameter of shape "
                    f"{tuple(parameter.shape)} that {why}"
                )


@contextmanager
def _unscaled(optimizer: Optimizer) -> Iterator[bool]:
    """Do what a `GradScaler` asks of the optimizer; yields whether this rank's gradient has overflowed."""
    held, asked = vars(optimizer), dict[str, Any]()
    for name in ("grad_scale", "found_inf"):
        if name in held:
            asked[name] = held.pop(name)
    scale, overflown = asked.get("grad_scale"), bool(asked.get("found_inf", 0))
    if scale is not None and not overflown:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.div_(scale)
    try:
        yield overflown
    finally:
        held.update(asked)  # it takes them away itself


def _evaluate(closure: Closure | None) -> Tensor | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


NUMBERS: Final = (int, float, tuple, Tensor)
"""Types of options that are compared between the ranks."""


def _options_of(optimizer: Optimizer) -> list[dict[str, object]]:
    """The numbers among the optimizer's options, group by group."""
    return [
        {name: _numbers_in(value) for name, value in group.items() if isinstance(value, NUMBERS)}
        for group in optimizer.param_groups
    ]


def _numbers_in(value: object) -> object:
    """The same with numbers in place of tensors, which processes can compare."""
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 else tuple(value.flatten().tolist())
    return tuple(map(_numbers_in, value)) if isinstance(value, tuple) else value


def _hash_of(optimizer: Optimizer) -> int:
    """A hash of the optimizer's options, the same in every process."""
    values = [value for group in optimizer.param_groups for value in group.values()]
    return hash(tuple([_numbers_in(value) for value in values if isinstance(value, NUMBERS)]))


def _refuse_other_optimizers(table: Tensor) -> None:
    if bool((table[:, :2] != table[0, :2]).any()):
        raise BadOption(
            f"the ranks step different optimizers at the same time: by rank, in the order of distribute(), "
            f"{table[:, 1].tolist()}; let every rank make the same steps"
        )


def _refuse_difference(table: Tensor, optimizer: Optimizer, comm: Communicator) -> None:
    """Refuse a step for which the ranks differ, and say in what (collective)."""
    _refuse_other_optimizers(table)
    if bool((table[:, 3] != table[0, 3]).any()):
        raise BadOption(
            "the optimizer's state was loaded or changed on some ranks and not on others: by rank, "
            f"{table[:, 3].tolist()}; do it on every rank"
        )
    passes = table[:, 4]
    if bool((passes[passes > 0] != passes.max()).any()):
        raise BadOption(
            "the ranks come to a step after different numbers of backward passes: by rank, "
            f"{passes.tolist()}; a rank leaves out all passes before a step, or none"
        )
    everyone = cast("list[list[dict[str, object]]]", comm.all_gather_objects(_options_of(optimizer)))
    for rank, theirs in enumerate(everyone):
        for group, (first, other) in enumerate(zip(everyone[0], theirs, strict=True)):
            for name, value in first.items():
                if other.get(name) != value:
                    raise BadOption(
                        f"'{name}' of param group {group} is {value} on rank 0 and {other.get(name)} on "
                        f"rank {rank}; let all ranks have the same: a scheduler that is told a loss needs "
                        "that of all of them, scheduler.step(tutti.mean(loss))"
                    )
