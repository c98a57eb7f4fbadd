"""The update of a model's portions: clipped by the norm of the whole, and added up over the teams."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.model_parallel.base import LayoutRanks
from tutti.optim.clipping import clip_values, scale_for, squared_norm
from tutti.replica import Replica, local
from tutti.strategies.base import Clip, NormShare, Strategy, Worker


class Gradients:
    """The gradients that this rank holds.

    Args:
        module: this rank's portion of the model.
        counts: whether this rank counts a parameter in the norm of the whole: every element of the model is
            counted by one rank of the team.
    """

    def __init__(self, module: nn.Module, counts: Callable[[nn.Parameter], bool]) -> None:
        self._module, self.counts = module, counts

    def __iter__(self) -> Iterator[tuple[Tensor, bool]]:
        """Each gradient, and whether it counts."""
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                yield local(parameter.grad), self.counts(parameter)


def add_up(team: Communicator, squares: float) -> float:
    """The sum of a number over the ranks of a team (collective)."""
    total = torch.tensor([squares], dtype=torch.float64)
    team.all_reduce(total)
    return total.item()


class Clipper:
    """The clipping of the gradient of a model of which every rank of a team holds a portion.

    Args:
        team: the ranks that hold it together.
        gradients: this rank's.
        clip: the limits.
    """

    def __init__(self, team: Communicator, gradients: Gradients, clip: Clip) -> None:
        self._team, self._gradients, self._clip = team, gradients, clip

    @torch.no_grad()
    def __call__(self) -> None:
        """Clip (collective over the team, when there is a limit for the norm)."""
        if self._clip.value is not None:
            clip_values([gradient for gradient, _ in self._gradients], self._clip.value)
        if self._clip.norm is None:
            return
        squares = squared_norm(gradient for gradient, counts in self._gradients if counts)
        scale = scale_for(math.sqrt(add_up(self._team, squares)), self._clip.norm)
        if scale != 1:
            for gradient, _ in self._gradients:
                gradient.mul_(scale)


class _Clipped(Worker):
    """A worker that clips, and has another worker move the portion."""

    def __init__(self, inner: Worker, clipper: Clipper) -> None:
        super().__init__()
        self.traffic, self.updating = inner.traffic, inner.updating
        self._inner, self._clipper = inner, clipper

    @override
    def step(self) -> None:
        self._clipper()
        self._inner.step()

    @override
    def finish(self) -> None:
        self._inner.finish()


def worker_of(
    strategy: Strategy,
    replica: Replica,
    ranks: LayoutRanks,
    optimizer: Optimizer,
    clip: Clip,
    gradients: Gradients,
) -> Worker:
    """The strategy's worker among those that hold the same portion.

    Of one team the gradient is clipped before the strategy sees it. Those of several are added up by the
    strategy, so it must clip the sum, by the norm over the team.

    Raises:
        BadOption: the norm of the gradient is to be limited, and the strategy cannot do that.
    """
    if clip.norm is None:
        return strategy.worker(replica, ranks.data, optimizer, clip)
    if ranks.data.size == 1:
        inner = strategy.worker(replica, ranks.data, optimizer, Clip())
        return _Clipped(inner, Clipper(ranks.team, gradients, clip))
    if not strategy.joint_norm:
        raise BadOption(
            f"--clip-norm limits the gradient of the whole model, of which the {ranks.data.size} teams of "
            f"strategy '{strategy.name}' have portions only; leave it out, or use --strategy sync"
        )
    division = NormShare(gradients.counts, partial(add_up, ranks.team))
    return strategy.worker(replica, ranks.data, optimizer, replace(clip, divided=division))
