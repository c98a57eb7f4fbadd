"""A rank's portion of a model, and its training."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator, Group
from tutti.data.columns import Inputs
from tutti.data.parts import Part
from tutti.errors import BadOption
from tutti.records.pipeline import PipelineRecord
from tutti.replica import NormShare, Replica
from tutti.state import Saved, State, found_under, put_under
from tutti.strategies.base import Clip, Strategy, Worker
from tutti.strategies.inside import GroupWorker
from tutti.strategies.placement import place, shared_memory
from tutti.training.losses import Loss
from tutti.training.precision import Arithmetic
from tutti.training.run_parts import Compute

if TYPE_CHECKING:
    # Imported where it is used: torch.distributed's parts take a second.
    from tutti.model_parallel.group import TeamMesh


@dataclass(frozen=True)
class LayoutRanks:
    """The communicators of a layout."""

    every: Communicator
    """All ranks of the job."""

    team: Communicator
    """Those that hold one model together."""

    data: Communicator
    """Those that hold the same portion, one of each team."""

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
    """Samples, loss and arithmetic of a run: all ranks share the `batch_size` samples of an update."""

    samples: Part
    batch_size: int
    loss: Loss
    arithmetic: Arithmetic

    def batch(self, count: int) -> tuple[Inputs, Tensor]:
        """Return the inputs and targets of at most `count` samples, as the model takes them."""
        inputs, targets = self.samples.take(torch.arange(min(count, len(self.samples))))
        return self.arithmetic.inputs(inputs), self.arithmetic.targets(targets)


Of = Callable[[Tensor], Tensor]
"""A function of a parameter or buffer: its values, or its gradient."""


def values_of(tensor: Tensor) -> Tensor:
    """Return the numbers in a tensor."""
    return tensor.detach()


def gradient_of(tensor: Tensor) -> Tensor:
    """Return the gradient of a tensor; zero if there is none."""
    return torch.zeros_like(tensor.detach()) if tensor.grad is None else tensor.grad.detach()


class Portion(ABC):
    """One rank's portion of a model."""

    # Takes whole inputs and gives whole outputs, on every rank; the ranks of a team call it together.
    module: nn.Module
    # The ranks over which samples are dealt and results added up: one of each group that computes the same.
    peers: Communicator
    data: Communicator  # the ranks that hold the same portion, over which the worker adds up gradients
    parameters: int  # trainable numbers of the whole model
    group: Group | None = None  # the ranks of this rank's worker; None: the rank is a whole worker
    compute: Compute | None = None  # forward and backward of a batch; None: outputs first, then the loss

    @abstractmethod
    def place(self, strategy: Strategy) -> Replica:
        """Lay this portion out for training (collective)."""

    @abstractmethod
    def worker(self, strategy: Strategy, replica: Replica, optimizer: Optimizer, clip: Clip) -> Worker:
        """Make the worker that moves this portion, given its gradient (collective)."""

    @abstractmethod
    def state(self, of: Of = values_of) -> dict[str, Any]:
        """Return the values or gradients of the whole, undivided model by name (collective)."""

    def to_save(self, state: State) -> State:
        """Return the state of this portion's trainer in the form of a checkpoint."""
        return state

    def record(self) -> PipelineRecord | None:
        """Return the record of a pipeline; None for other portions (collective)."""
        return None

    def close(self) -> None:
        """Release resources other than memory (collective)."""
        return


class Whole(Portion):
    """The whole model on every rank: data parallelism."""

    def __init__(self, module: nn.Module, comm: Communicator, strategy: Strategy) -> None:
        self.module, self.peers, self.data, self.parameters = module, comm, comm, count_of(module)
        self.group = strategy.groups(comm)

    @override
    def place(self, strategy: Strategy) -> Replica:
        memory = None if self.group is None else shared_memory(self.group.ranks)
        return place(self.module, self.peers, strategy.home, memory)

    @override
    def worker(self, strategy: Strategy, replica: Replica, optimizer: Optimizer, clip: Clip) -> Worker:
        if self.group is not None:
            return GroupWorker(strategy, replica, self.group, optimizer, clip)
        return strategy.worker(replica, self.peers, optimizer, clip)

    @override
    def close(self) -> None:
        if self.group is not None:
            self.group.close()

    @override
    def state(self, of: Of = values_of) -> dict[str, Any]:
        return taken(self.module, of)


class TeamPortion(Portion):
    """One rank's portion of a model that a team holds together; for `counts` see `NormShare`."""

    def __init__(
        self,
        module: nn.Module,
        ranks: LayoutRanks,
        counts: Callable[[nn.Parameter], bool],
        group: TeamMesh | None = None,
    ) -> None:
        self.module, self.peers, self.data = module, ranks.data, ranks.data
        self.parameters, self.ranks, self._group = count_of(module), ranks, group
        self._share = NormShare(counts, self._add_up)

    def _add_up(self, squares: float) -> float:
        """Return the sum of a number over the ranks of the team (collective)."""
        total = torch.tensor([squares], dtype=torch.float64)
        self.ranks.team.all_reduce(total)
        return total.item()

    @override
    def to_save(self, state: State) -> State:
        """Put what holders of the same portion share under its number; the rest is this rank's own."""
        number, own = str(self.ranks.team.rank), {"shared": state.shared, "own": state.own}
        return replace(state, joint=put_under(number, state.joint), own=own)

    @override
    def place(self, strategy: Strategy) -> Replica:
        replica = place(self.module, self.ranks.data, strategy.home)
        replica.gradients.share = self._share
        return replica

    @override
    def worker(self, strategy: Strategy, replica: Replica, optimizer: Optimizer, clip: Clip) -> Worker:
        if clip.norm is not None and not strategy.joint_norm:
            raise BadOption(
                f"--clip-norm limits the gradient of the whole model, but strategy '{strategy.name}' would "
                "limit each rank's portion; leave it out, or use --strategy sync"
            )
        return strategy.worker(replica, self.ranks.data, optimizer, clip)

    @override
    def close(self) -> None:
        if self._group is not None:
            self._group.close()
        self.ranks.close()


def of_portion(saved: Saved, number: int) -> Saved:
    """Return the state from which the trainer of a portion continues, given `TeamPortion.to_save`'s."""
    assert saved.own is not None, "it is of the same number of ranks"
    return replace(saved, joint=found_under(str(number), saved.joint), **saved.own)


def taken(module: nn.Module, of: Of) -> dict[str, Any]:
    """Return the state of a module by name, with `of` applied to each tensor."""
    held = module.state_dict(keep_vars=True)
    return {name: of(value) if isinstance(value, Tensor) else value for name, value in held.items()}


def count_of(module: nn.Module) -> int:
    """Return the number of trainable numbers in a module."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
