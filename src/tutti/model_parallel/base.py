"""A rank's portion of a model, and the way to train it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.data.columns import Inputs
from tutti.data.parts import Part
from tutti.errors import BadOption
from tutti.optim.clipping import clip_values, scale_for, squared_norm
from tutti.records.pipeline import PipelineRecord
from tutti.replica import Replica, local
from tutti.state import Saved, State, found_under, put_under
from tutti.strategies.base import Clip, NormShare, Strategy, Worker
from tutti.strategies.placement import place
from tutti.training.losses import Loss
from tutti.training.precision import Arithmetic
from tutti.training.run_parts import Compute

if TYPE_CHECKING:
    # Imported where it is used: torch.distributed's parts take a second.
    from tutti.model_parallel.group import TeamMesh


@dataclass(frozen=True)
class LayoutRanks:
    """The communicators of a layout.

    Attributes:
        every: all ranks of the job.
        team: those that hold one model together.
        data: those that hold the same portion, one of each team.
    """

    every: Communicator
    team: Communicator
    data: Communicator

    @classmethod
    def of(cls, comm: Communicator, size: int) -> LayoutRanks:
        """Split `comm` into teams of `size` neighbours (collective)."""
        number, member = divmod(comm.rank, size)
        team, data = comm.split(number), comm.split(member)
        assert team is not None, "every rank is in a team"
        assert data is not None, "every rank has a place in its team"
        return cls(comm, team, data)

    def close(self) -> None:
        """Leave the communicators that were split off."""
        self.team.close()
        self.data.close()


@dataclass(frozen=True)
class Workload:
    """The samples, the loss and the arithmetic of a run: all ranks have `batch_size` samples of an update."""

    samples: Part
    batch_size: int
    loss: Loss
    arithmetic: Arithmetic

    def batch(self, count: int) -> tuple[Inputs, Tensor]:
        """The inputs and targets of at most `count` samples, as the model wants them."""
        inputs, targets = self.samples.take(torch.arange(min(count, len(self.samples))))
        return self.arithmetic.inputs(inputs), self.arithmetic.targets(targets)


Of = Callable[[Tensor], Tensor]
"""A function of a parameter or buffer: its values, or its gradient."""


def values_of(tensor: Tensor) -> Tensor:
    """The numbers in a tensor."""
    return tensor.detach()


def gradient_of(tensor: Tensor) -> Tensor:
    """The gradient of a tensor; zero where there is none."""
    return torch.zeros_like(tensor.detach()) if tensor.grad is None else tensor.grad.detach()


class Portion(ABC):
    """One rank's portion of a model.

    Attributes:
        module: takes whole inputs and gives whole outputs, on every rank; the ranks of a team call it
            together.
        peers: the ranks over which samples are dealt and results added up: one of each group that computes
            the same samples together.
        data: the ranks that hold the same portion, over which the worker adds up gradients.
        parameters: trainable numbers of the whole model.
        compute: forward and backward of a batch; None: as for any module, outputs first, then the loss.
    """

    module: nn.Module
    peers: Communicator
    data: Communicator
    parameters: int
    compute: Compute | None = None

    @abstractmethod
    def place(self, strategy: Strategy) -> Replica:
        """Lay this portion out for training (collective)."""

    @abstractmethod
    def worker(self, strategy: Strategy, replica: Replica, optimizer: Optimizer, clip: Clip) -> Worker:
        """Make the worker that moves this portion, given its gradient (collective).

        Raises:
            BadOption: the gradient cannot be clipped like that.
        """

    @abstractmethod
    def state(self, of: Of = values_of) -> dict[str, Any]:
        """The state of the whole model by name, as the undivided module would give it (collective).

        Args:
            of: what is taken of each tensor: its values, or its gradient as far as this team has added to it.
        """

    def to_save(self, state: State) -> State:
        """Return the state of this portion's trainer as a checkpoint has it."""
        return state

    def record(self) -> PipelineRecord | None:
        """The record of a pipeline; None of other portions (collective)."""
        return None

    def close(self) -> None:
        """Give back what this holds besides memory (collective)."""
        return


class Whole(Portion):
    """The whole model on every rank: data parallelism."""

    def __init__(self, module: nn.Module, comm: Communicator) -> None:
        self.module, self.peers, self.data, self.parameters = module, comm, comm, count_of(module)

    @override
    def place(self, strategy: Strategy) -> Replica:
        return place(self.module, self.peers, strategy.home)

    @override
    def worker(self, strategy: Strategy, replica: Replica, optimizer: Optimizer, clip: Clip) -> Worker:
        return strategy.worker(replica, self.peers, optimizer, clip)

    @override
    def state(self, of: Of = values_of) -> dict[str, Any]:
        return taken(self.module, of)


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

    def add_up(self, squares: float) -> float:
        """The sum of a number over the ranks of the team (collective)."""
        total = torch.tensor([squares], dtype=torch.float64)
        self._team.all_reduce(total)
        return total.item()

    @torch.no_grad()
    def clip(self, clip: Clip) -> None:
        """Clip them (collective over the team, when there is a limit for the norm)."""
        if clip.value is not None:
            clip_values([gradient for gradient, _ in self], clip.value)
        if clip.norm is None:
            return
        squares = squared_norm(gradient for gradient, counts in self if counts)
        scale = scale_for(math.sqrt(self.add_up(squares)), clip.norm)
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
    def settle(self) -> None:
        self._inner.settle()

    @override
    def resume(self) -> None:
        self._inner.resume()

    @property
    @override
    def anew(self) -> tuple[str, ...]:
        return self._inner.anew

    @override
    def state(self) -> State:
        return self._inner.state()

    @override
    def load_state(self, saved: Saved) -> None:
        self._inner.load_state(saved)

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
    def to_save(self, state: State) -> State:
        """Put what holders of the same portion share under its number; all else is this rank's own."""
        number, own = str(self.ranks.team.rank), {"shared": state.shared, "own": state.own}
        return replace(state, joint=put_under(number, state.joint), own=own)

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
        division = NormShare(self.gradients.counts, self.gradients.add_up)
        return strategy.worker(replica, ranks.data, optimizer, replace(clip, divided=division))

    @override
    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self.ranks.close()


def of_portion(saved: Saved, number: int) -> Saved:
    """Return what the trainer of a portion goes on from, of what `TeamPortion.to_save` has returned."""
    assert saved.own is not None, "it is of as many ranks"
    return replace(saved, joint=found_under(str(number), saved.joint), **saved.own)


def taken(module: nn.Module, of: Of) -> dict[str, Any]:
    """The state of a module by name, with what `of` takes of each tensor."""
    held = module.state_dict(keep_vars=True)
    return {name: of(value) if isinstance(value, Tensor) else value for name, value in held.items()}


def count_of(module: nn.Module) -> int:
    """The number of trainable numbers in a module."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
