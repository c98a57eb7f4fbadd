"""Layouts: the ranks that hold one model together, the way they do, and the number of teams. Needs no torch.

data=2,tensor=2      team 0: ranks 0 1      team 1: ranks 2 3
                     the same portion: ranks 0 and 2, ranks 1 and 3
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from torch import nn

    from tutti.comm.base import Communicator
    from tutti.model_parallel.base import Portion, Workload
    from tutti.model_parallel.memory import MemoryNeed

DATA: Final = "data"
"""The direction in which every team has samples of its own."""


@dataclass(frozen=True)
class Way(ABC):
    """A way to hold one model on several ranks. The fields of a subclass are the options of `--parallel`."""

    @abstractmethod
    def portion(self, layout: Layout, comm: Communicator, module: nn.Module, workload: Workload) -> Portion:
        """Make this rank's portion of a model (collective): see `portion_of`."""

    @abstractmethod
    def need(self, layout: Layout, module: nn.Module, workload: Workload, state: float) -> MemoryNeed:
        """The need of the rank that needs the most.

        `state` is the bytes of state that the optimizer keeps for each byte of parameters.
        """


@dataclass(frozen=True)
class Layout:
    """A division of the ranks into teams, each of which holds one model.

    Attributes:
        way: the name of one of `WAYS`.
        team: ranks that hold one model together; they are neighbours.
        data: the number of teams.
        options: the way itself, with its options.
    """

    way: str
    team: int
    data: int
    options: Way

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.team * self.data

    def describe(self) -> str:
        """The layout as it would be written: data=2,tensor=2."""
        return f"{DATA}={self.data},{self.way}={self.team}" if self.data > 1 else f"{self.way}={self.team}"
