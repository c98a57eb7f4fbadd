"""A rank's portion of a model, and the way to train it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.data.parts import Part
from tutti.model_parallel.layout import Layout
from tutti.records.pipeline import PipelineRecord
from tutti.replica import Replica
from tutti.strategies.base import Clip, Strategy, Worker
from tutti.strategies.placement import place
from tutti.training.losses import Loss
from tutti.training.precision import Arithmetic
from tutti.training.trainer import Compute


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
    def of(cls, layout: Layout, comm: Communicator) -> LayoutRanks:
        """Split `comm` as the layout says (collective)."""
        number, member = divmod(comm.rank, layout.team)
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
    """The samples, the loss and the arithmetic of a training run.

    Attributes:
        samples: of the training part.
        batch_size: samples behind one update, over all ranks.
        loss: of the run.
        arithmetic: how the model computes; it was prepared by it.
    """

    samples: Part
    batch_size: int
    loss: Loss
    arithmetic: Arithmetic

    def batch(self, count: int) -> tuple[Tensor, Tensor]:
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

    def record(self) -> PipelineRecord | None:
        """The record of a pipeline; None of other portions (collective)."""
        return None

    def close(self) -> None:
        """Give back what this holds besides memory (collective)."""
        return


class Whole(Portion):
    """The whole model on every rank: data parallelism.

    Args:
        module: the model.
        comm: all ranks that train.
    """

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


def portion_of(layout: Layout | None, comm: Communicator, module: nn.Module, workload: Workload) -> Portion:
    """Make this rank's portion of a model (collective).

    Args:
        layout: who holds what; None: each rank the whole.
        comm: all ranks that train.
        module: the model, alike on all ranks. It becomes the portion.
        workload: the samples and the loss.

    Raises:
        BadModel: the model cannot be divided like that; the message names the layer.
        BadOption: an option does not fit the model.
    """
    return Whole(module, comm) if layout is None else layout.options.portion(layout, comm, module, workload)


def taken(module: nn.Module, of: Of) -> dict[str, Any]:
    """The state of a module by name, with what `of` takes of each tensor."""
    held = module.state_dict(keep_vars=True)
    return {name: of(value) if isinstance(value, Tensor) else value for name, value in held.items()}


def count_of(module: nn.Module) -> int:
    """The number of trainable numbers in a module."""
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
