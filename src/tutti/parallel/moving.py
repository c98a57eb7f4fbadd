"""How the portions of a model are moved: clipped by the norm of the whole, and added up over the teams."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.optim.clipping import clip_values, scale_for, squared_norm
from tutti.parallel.base import Ranks
from tutti.replica import Replica, local
from tutti.strategies.base import Clip, Strategy, Worker

Gradients = Callable[[], Iterable[tuple[Tensor, bool]]]
"""The gradients that this rank holds, and whether it counts each in the norm of the whole: every element of
the model is counted by one rank of the team."""


def gradients_of(module: nn.Module, counts: Callable[[nn.Parameter], bool]) -> Gradients:
    """The gradients of `module`; `counts` says which parameters this rank counts."""

    def gradients() -> Iterator[tuple[Tensor, bool]]:
        for parameter in module.parameters():
            if parameter.grad is not None:
                yield local(parameter.grad), counts(parameter)

    return gradients


class Clipper:
    """Clips the gradient of a model of which every rank of a team holds a portion.

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
            clip_values([gradient for gradient, _ in self._gradients()], self._clip.value)
        if self._clip.norm is None:
            return
        squares = squared_norm(gradient for gradient, counts in self._gradients() if counts)
        total = torch.tensor([squares], dtype=torch.float64)
        self._team.all_reduce(total)
        scale = scale_for(math.sqrt(total.item()), self._clip.norm)
        if scale != 1:
            for gradient, _ in self._gradients():
                gradient.mul_(scale)


class _Clipped(Worker):
    """Clips, and has another worker move the portion."""

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
    strategy: Strategy, replica: Replica, ranks: Ranks, optimizer: Optimizer, clip: Clip, gradients: Gradients
) -> Worker:
    """The strategy's worker among those that hold the same portion.

    Raises:
        BadOption: there are several teams, and the norm of the gradient is to be limited.
    """
    if clip.norm is None:
        return strategy.worker(replica, ranks.data, optimizer, clip)
    if ranks.data.size > 1:
        raise BadOption(
            f"--clip-norm limits the gradient of the whole model after those of {ranks.data.size} teams are "
            "added up, where no rank has all of it; leave --clip-norm out, or use one team (no data=)"
        )
    inner = strategy.worker(replica, ranks.data, optimizer, Clip())
    return _Clipped(inner, Clipper(ranks.team, gradients, clip))
