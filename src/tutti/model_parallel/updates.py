"""The update of a model's portions: clipped by the norm of the whole, and added up over the teams."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.model_parallel.base import LayoutRanks, Portion, count_of
from tutti.optim.clipping import clip_values, scale_for, squared_norm
from tutti.replica import Replica, local
from tutti.strategies.base import Clip, NormShare, Strategy, Worker
from tutti.strategies.placement import place

if TYPE_CHECKING:
    # Imported where it is used: torch.distributed's parts take a second.
    from tutti.model_parallel.group import TeamMesh


def add_up(team: Communicator, squares: float) -> float:
    """The sum of a number over the ranks of a team (collective)."""
    total = torch.tensor([squares], dtype=torch.float64)
    team.all_reduce(total)
    return total.item()


class Gradients:
    """The gradients that this rank holds.

    Args:
        module: this rank's portion of the model.
        team: the ranks that hold it together.
        counts: whether this rank counts a parameter in the norm of the whole: every element of the model is
            counted by one rank of the team.
    """

    def __init__(self, module: nn.Module, team: Communicator, counts: Callable[[nn.Parameter], bool]) -> None:
        self._module, self._team, self.counts = module, team, counts

    def __iter__(self) -> Iterator[tuple[Tensor, bool]]:
        """Each gradient, and whether it counts."""
        for parameter in self._module.parameters():
            if parameter.grad is not None:
                yield local(parameter.grad), self.counts(parameter)

    @torch.no_grad()
    def clip(self, clip: Clip) -> None:
        """Clip them (collective over the team, when there is a limit for the norm)."""
        if clip.value is not None:
            clip_values([gradient for gradient, _ in self], clip.value)
        if clip.norm is None:
            return
        squares = squared_norm(gradient for gradient, counts in self if counts)
        scale = scale_for(math.sqrt(add_up(self._team, squares)), clip.norm)
        if scale != 1:
            for gradient, _ in self:
                gradient.mul_(scale)


class _Clipped(Worker):
    """A worker that clips, and has another worker move the portion."""

    def __init__(self, inner: Worker, gradients: Gradients, clip: Clip) -> None:
        super().__init__()
        self.traffic, self.updating = inner.traffic, inner.updating
        self._inner, self._gradients, self._clip = inner, gradients, clip

    @override
    def step(self) -> None:
        self._gradients.clip(self._clip)
        self._inner.step()

    @override
    def finish(self) -> None:
        self._inner.finish()


class TeamPortion(Portion):
    """One rank's portion of a model that a team holds together.

    Args:
        module: the portion, or the model that is to become it.
        ranks: who holds what.
        counts: whether this rank counts a parameter in the norm of the whole, as in `Gradients`.
        group: torch.distributed among the ranks, where that is used.
    """

    def __init__(
        self,
        module: nn.Module,
        ranks: LayoutRanks,
        counts: Callable[[nn.Parameter], bool],
        group: TeamMesh | None = None,
    ) -> None:
        self.module, self.peers, self.data = module, ranks.data, ranks.data
        self.parameters, self.ranks, self._group = count_of(module), ranks, group
        self.gradients = Gradients(module, ranks.team, counts)

    @override
    def place(self, strategy: Strategy) -> Replica:
        return place(self.module, self.ranks.data, strategy.home)

    @override
    def worker(self, strategy: Strategy, replica: Replica, optimizer: Optimizer, clip: Clip) -> Worker:
        """Make the strategy's worker among those that hold the same portion.

        Of one team the gradient is clipped before the strategy sees it. Those of several are added up by the
        strategy, so it must clip the sum, by the norm over the team.
        """
        ranks = self.ranks
        if clip.norm is None:
            return strategy.worker(replica, ranks.data, optimizer, clip)
        if ranks.data.size == 1:
            inner = strategy.worker(replica, ranks.data, optimizer, Clip())
            return _Clipped(inner, self.gradients, clip)
        if not strategy.joint_norm:
            raise BadOption(
                f"--clip-norm limits the gradient of the whole model, of which the {ranks.data.size} teams "
                f"of strategy '{strategy.name}' have portions only; leave it out, or use --strategy sync"
            )
        division = NormShare(self.gradients.counts, partial(add_up, ranks.team))
        return strategy.worker(replica, ranks.data, optimizer, replace(clip, divided=division))

    @override
    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self.ranks.close()
