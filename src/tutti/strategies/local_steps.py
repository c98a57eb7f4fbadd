"""A worker's steps on weights of its own, by the user's optimizer or with Nesterov's momentum."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, optim
from torch.optim import Optimizer
from typing_extensions import override

from tutti.errors import BadOption
from tutti.optim.clipping import clip_gradients
from tutti.optim.sharded import ShardedOptimizer
from tutti.replica import NONE_MISSING, Missing, Replica, copy_all
from tutti.state import Held, Named, Saved, State, fill_all, pieces_of_all
from tutti.strategies.base import Clip, Worker

_FOREIGN: Final = ("momentum", "dampening", "nesterov", "maximize")
"""Options of SGD that cannot be had together with a momentum of the strategy's."""

OWN: Final = "own_weights"
"""The first word of the names of weights that are a worker's own, in a checkpoint."""

VELOCITY: Final = "velocity"
"""That of the names of the strategy's momentum."""


class OwnWeightsWorker(Worker):
    """A worker with weights of its own, which are put aside while those that all agree on are evaluated.

    Args:
        steps: its own steps; None if it makes none.
    """

    def __init__(self, replica: Replica, steps: ShardedOptimizer | LocalSteps | None, clip: Clip) -> None:
        super().__init__()
        self.replica, self.steps, self._clip = replica, steps, clip
        self.weights = [flat.weights for flat in replica.flats]
        self.grads = [flat.grads for flat in replica.flats]
        self._aside: list[Tensor] = []
        own = ("each worker's own weights",)
        self.restarts = own if steps is None else (*own, "the state of each worker's optimizer")

    @property
    def settled(self) -> bool:
        """True while the replica has the weights to be evaluated, and this worker's own are put aside."""
        return bool(self._aside)

    def move(self) -> None:
        """Step by this worker's own gradient, which is zero afterwards."""
        assert self.steps is not None
        with self.updating:
            self.prepare()
            self.steps.step()
            self.replica.zero_grad()

    def prepare(self) -> None:
        """Clip this worker's own gradient."""
        clip_gradients(self.replica.gradients, self._clip.norm, self._clip.value)

    @abstractmethod
    def agree(self) -> None:
        """Overwrite the weights with those to be evaluated (collective)."""

    @override
    def settle(self) -> None:
        self._aside = [weights.clone() for weights in self.weights]
        self.agree()

    @override
    def resume(self) -> None:
        if self._aside:
            copy_all(self.weights, self._aside)
            self._aside = []

    @override
    def adopt(self, optimizer: bool = False) -> None:
        if self._aside and not optimizer:
            self._aside = [weights.clone() for weights in self.weights]

    @override
    def state(self) -> State:
        """Return the weights put aside, and what the own steps remember."""
        alone = Held([*pieces_of_all(OWN, self.replica.flats, self._aside)])
        if self.steps is not None:
            alone.add(self.steps.state())
        return State(alone=alone)

    @override
    def load_state(self, saved: Saved) -> None:
        """Go on from the weights that were this worker's own; else from those that all agreed on."""
        if saved.alone is not None:
            fill_all(saved.alone.tensors, OWN, self.replica.flats, self.weights)

    @override
    def finish(self) -> None:
        self.agree()
        self._aside = []


class LocalSteps:
    """The steps of a replica by its own gradients.

    With momentum the replica holds x + momentum v, where the gradient is wanted, instead of x. Parameters
    that a step has no gradient for are left as they are, with their momentum.

    Args:
        replica: the model, with private weights.
        optimizer: the user's; the steps are its own without `momentum`.
        momentum: delta of Nesterov's momentum; 0: none.
        strategy: the name of the strategy, for messages.

    Raises:
        BadOption: there is a momentum, and the optimizer is another than SGD or has a momentum itself.
    """

    def __init__(self, replica: Replica, optimizer: Optimizer, momentum: float, strategy: str) -> None:
        self._replica, self._optimizer, self._momentum = replica, optimizer, momentum
        self._sharded = ShardedOptimizer(optimizer, replica)
        self._velocities: list[Tensor] = []
        if momentum:
            _refuse_unfit(optimizer, strategy)
            self._velocities = [torch.zeros_like(flat.weights) for flat in replica.flats]
            self._runs = _runs(optimizer, replica)

    def step(self) -> None:
        """Move the weights; the gradients may be changed."""
        if not self._momentum:
            self._sharded.step()
        else:
            self._sharded.begin()
            missing = self._replica.gradients.missing()
            all_runs = _runs(self._optimizer, self._replica, missing) if missing else self._runs
            for flat, velocity, runs in zip(self._replica.flats, self._velocities, all_runs, strict=True):
                for place, group in runs:
                    gradient, weights = flat.grads[place], flat.weights[place]
                    if group["weight_decay"]:
                        gradient.add_(weights, alpha=group["weight_decay"])
                    nesterov(weights, velocity[place], gradient, float(group["lr"]), self._momentum)

    def state(self) -> Held:
        """Return the state of the user's optimizer, and the velocities."""
        held = self._sharded.state()
        if self._momentum:
            held.pieces += pieces_of_all(VELOCITY, self._replica.flats, self._velocities)
        return held

    def load_state(self, held: Named | None) -> None:
        """Go on with the velocities of earlier steps; None: with none. The optimizer has its state."""
        if self._momentum and held is not None:
            fill_all(held.tensors, VELOCITY, self._replica.flats, self._velocities)

    def rest(self) -> None:
        """Lose all momentum: the replica holds x itself."""
        for velocity in self._velocities:
            velocity.zero_()

    @contextmanager
    def at_rest(self) -> Iterator[None]:
        """While inside, the replica holds x itself."""
        self._shift(-self._momentum)
        yield
        self._shift(self._momentum)

    def _shift(self, by: float) -> None:
        for flat, velocity in zip(self._replica.flats, self._velocities, strict=False):
            flat.weights.add_(velocity, alpha=by)


def _refuse_unfit(optimizer: Optimizer, strategy: str) -> None:
    if type(optimizer) is not optim.SGD:
        raise BadOption(
            f"option 'momentum' of strategy '{strategy}' is that of SGD, but the optimizer is "
            f"{type(optimizer).__name__}; use '--optimizer sgd', or '--strategy.momentum 0'"
        )
    for group in optimizer.param_groups:
        for name in _FOREIGN:
            if group[name]:
                raise BadOption(
                    f"the optimizer SGD has {name} = {group[name]} and strategy '{strategy}' has a momentum "
                    f"itself; use one of them: leave {name} out of the optimizer's options, or use "
                    "'--strategy.momentum 0'"
                )


def _runs(
    optimizer: Optimizer, replica: Replica, missing: Missing = NONE_MISSING
) -> list[list[tuple[slice, dict[str, Any]]]]:
    """Return, for each flat vector, slices of consecutive parameters of one group, without those missing."""
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"] if p not in missing}
    found = []
    for flat in replica.flats:
        runs: list[tuple[slice, dict[str, Any]]] = []
        before: dict[str, Any] | None = None
        for parameter, span in zip(flat.parameters, flat.spans, strict=True):
            group = group_of.get(id(parameter))
            if group is not None and group is before:
                runs[-1] = (slice(runs[-1][0].start, span.stop), group)
            elif group is not None:
                runs.append((span, group))
            before = group
        found.append(runs)
    return found


def nesterov(position: Tensor, velocity: Tensor, gradient: Tensor, lr: float, momentum: float) -> None:
    """Step by Nesterov's momentum, in the variable that the gradient is computed at, in place.

        v' = delta v - eta g(x + delta v)        x' = x + v'

    Source: Zhang, Choromanska, LeCun 2015, "Deep learning with Elastic Averaging SGD", arXiv:1412.6651,
    algorithm 2 (EAMSGD). With y = x + delta v, where the gradient is wanted, the same step is

        v' = delta v - eta g(y)                  y' = y - eta g(y) + delta v'

    Args:
        position: y, overwritten with y'.
        velocity: v, overwritten with v'.
        gradient: g(y).
        lr: eta.
        momentum: delta.
    """
    velocity.mul_(momentum).sub_(gradient, alpha=lr)
    position.sub_(gradient, alpha=lr).add_(velocity, alpha=momentum)
