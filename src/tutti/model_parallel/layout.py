"""Layouts: the ranks that hold one model together, how they do, and the number of teams. Needs no torch.

data=2,tensor=2      team 0: ranks 0 1      team 1: ranks 2 3
                     the same portion: ranks 0 and 2, ranks 1 and 3

A way to split a model is a name in `WAYS`, and a module of that name in this folder with

    portion(layout, comm, module, workload) -> Portion             this rank's portion (collective)
    need(layout, module, workload, state) -> MemoryNeed            of the rank that needs the most
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, cast

from tutti.errors import BadOption, UnknownName
from tutti.records.pipeline import SCHEDULES

if TYPE_CHECKING:
    from torch import nn

    from tutti.comm.base import Communicator
    from tutti.model_parallel.base import Portion, Workload
    from tutti.model_parallel.memory import MemoryNeed
    from tutti.strategies.base import Strategy

DATA: Final = "data"
"""The direction in which every team has its own samples."""


WAYS: Final[dict[str, list[str]]] = {
    "pipeline": ["schedule", "microbatches"],
    "sharded": [],
    "tensor": [],
}
"""The names of the options of each way, by its name."""


@dataclass(frozen=True)
class Layout:
    """A division of the ranks into teams that hold one model each."""

    way: str  # the name of one of `WAYS`
    team: int  # the number of ranks that hold one model together; they are neighbours
    data: int  # the number of teams
    schedule: str = "1f1b"  # of a pipeline: one of `SCHEDULES`
    # of a pipeline: the parts into which each team cuts its batch; by default twice the number of stages
    microbatches: int | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise UnknownName("value", str(self.schedule), SCHEDULES, of="--parallel.schedule")
        count = self.microbatches
        if count is not None and (type(count) is not int or count < 1):
            raise BadOption(f"--parallel.microbatches is {count!r}; give a whole number from 1")

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.team * self.data

    def describe(self) -> str:
        """Return the layout as text, such as data=2,tensor=2."""
        return f"{DATA}={self.data},{self.way}={self.team}" if self.data > 1 else f"{self.way}={self.team}"


def parse_layout(text: str, options: Mapping[str, Any], ranks: int) -> Layout:
    """Return the layout that `text` means on `ranks` ranks.

    It is one of `WAYS`, with `=N` for the ranks that hold one model together; after a comma, `data=N` is for
    the teams. A missing number follows from the others.
    """
    way, team, data = _sizes(text)
    if team is None and data is None:
        raise BadOption(f"--parallel {text} leaves both numbers open; give one, as in data=2,{way}")
    team = ranks // (data or 1) if team is None else team
    data = ranks // team if data is None else data
    known = options_of(way)
    for key in options:
        if key not in known:
            raise UnknownName("option", key, known, of=f"--parallel {way}")
    if team * data != ranks:
        raise BadOption(
            f"--parallel {text} makes {data} x {team} ranks, and there are {ranks}; use -n "
            f"{max(1, team * data)}, or numbers whose product is {ranks}, such as {way}={ranks}"
        )
    if team < 2:
        raise BadOption(f"--parallel {text} on {ranks} rank leaves nothing to share; use -n 2 or more")
    return Layout(way, team, data, **options)


def ranks_of(text: str) -> int | None:
    """Return the number of ranks that a layout requires; None if it is open."""
    _, team, data = _sizes(text)
    return team * data if team is not None and data is not None else None


def options_of(text: str) -> list[str]:
    """Return the names of a layout's options."""
    return WAYS[_sizes(text)[0]]


def _sizes(text: str) -> tuple[str, int | None, int | None]:
    """Return the way, the ranks of a team and the teams in a text; None: open."""
    sizes: dict[str, int | None] = {}
    for word in text.split(","):
        name, equals, number = (piece.strip() for piece in word.partition("="))
        if name not in (DATA, *WAYS):
            raise UnknownName("way", name, [*WAYS, DATA], "Write it as data=2,tensor=2.", "--parallel")
        if equals and not (number.isdecimal() and int(number) >= 1):
            raise BadOption(f"--parallel {text} has {name}={number}; give a whole number from 1")
        sizes[name] = int(number) if equals else None
    ways = [name for name in sizes if name != DATA]
    if len(ways) != 1:
        raise BadOption(
            f"--parallel {text} names {' and '.join(ways) or 'no way to share a model'}; name one of "
            f"{', '.join(WAYS)}, alone or with data, as in data=2,tensor=2"
        )
    return ways[0], sizes[ways[0]], sizes.get(DATA, 1)


def portion_of(
    layout: Layout | None, comm: Communicator, module: nn.Module, workload: Workload, strategy: Strategy
) -> Portion:
    """Make this rank's portion of a model (collective); without a layout each rank has the whole."""
    if layout is None:
        from tutti.model_parallel.base import Whole

        return Whole(module, comm, strategy)
    return cast("Portion", _way(layout).portion(layout, comm, module, workload))


def rank_need(layout: Layout, module: nn.Module, workload: Workload, state: float) -> MemoryNeed:
    """Return the memory of the rank that needs the most.

    `state` is the bytes of state that the optimizer keeps for each byte of parameters. Raises as
    `portion_of`.
    """
    return cast("MemoryNeed", _way(layout).need(layout, module, workload, state))


def _way(layout: Layout) -> Any:
    """Import the module of a way: torch.distributed's parts take a second."""
    return import_module(f"tutti.model_parallel.{layout.way}")
