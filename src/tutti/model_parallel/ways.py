"""The ways in which ranks hold one model together, and how layouts are written. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Final

from typing_extensions import override

from tutti.errors import BadOption, UnknownName
from tutti.model_parallel.layout import DATA, Layout, Way
from tutti.records.pipeline import SCHEDULES

if TYPE_CHECKING:
    from torch import nn

    from tutti.comm.base import Communicator
    from tutti.model_parallel.base import Portion, Workload
    from tutti.model_parallel.memory import MemoryNeed


@dataclass(frozen=True)
class Pipeline(Way):
    """Every rank has some of the layers, and batches pass through in small parts.

    Attributes:
        schedule: one of `SCHEDULES`.
        microbatches: into how many parts each team cuts its batch; by default twice the number of stages.
    """

    schedule: str = "1f1b"
    microbatches: int | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise UnknownName("value", str(self.schedule), SCHEDULES, of="--parallel.schedule")
        count = self.microbatches
        if count is not None and (not isinstance(count, int) or isinstance(count, bool) or count < 1):
            raise BadOption(f"--parallel.microbatches is {count!r}; give a whole number from 1")

    @override
    def portion(self, layout: Layout, comm: Communicator, module: nn.Module, workload: Workload) -> Portion:
        from tutti.model_parallel.pipeline import PipelinePortion, divide

        division = divide(module, self.schedule, self.microbatches, layout, workload)
        return PipelinePortion(module, division, layout, comm, workload)

    @override
    def need(self, layout: Layout, module: nn.Module, workload: Workload, state: float) -> MemoryNeed:
        from tutti.model_parallel.pipeline import divide, need_of_rank

        division = divide(module, self.schedule, self.microbatches, layout, workload)
        needs = [need_of_rank(rank, division, layout, workload, state) for rank in range(layout.team)]
        return max(needs, key=lambda need: need.total)


@dataclass(frozen=True)
class Sharded(Way):
    """The ranks hold slices of every parameter, and gather it for use."""

    @override
    def portion(self, layout: Layout, comm: Communicator, module: nn.Module, workload: Workload) -> Portion:
        from tutti.model_parallel.base import LayoutRanks
        from tutti.model_parallel.fsdp import ShardedPortion
        from tutti.model_parallel.group import TeamMesh

        ranks = LayoutRanks.of(comm, layout.team)
        return ShardedPortion(module, ranks, TeamMesh(comm, layout.team), workload)

    @override
    def need(self, layout: Layout, module: nn.Module, workload: Workload, state: float) -> MemoryNeed:
        from tutti.model_parallel.fsdp import need

        return need(layout, module, workload, state)


@dataclass(frozen=True)
class Tensor(Way):
    """Every layer's weights are cut over the ranks.

    Attributes:
        plan: file.py:function or package.module:function, called with the model; returns a plan of
            `torch.distributed.tensor.parallel`, {name of a module: style}. None: every Linear and Conv2d
            layer is split by its outputs.
    """

    plan: str | None = None

    @override
    def portion(self, layout: Layout, comm: Communicator, module: nn.Module, workload: Workload) -> Portion:
        from tutti.model_parallel.base import LayoutRanks

        ranks = LayoutRanks.of(comm, layout.team)
        if self.plan is None:
            from tutti.model_parallel.tensor import TensorPortion

            return TensorPortion(module, ranks)
        from tutti.model_parallel.dtensor import PlannedPortion
        from tutti.model_parallel.group import TeamMesh

        return PlannedPortion(module, ranks, TeamMesh(comm, layout.team), self.plan)

    @override
    def need(self, layout: Layout, module: nn.Module, workload: Workload, state: float) -> MemoryNeed:
        from tutti.model_parallel.tensor import need

        if self.plan is not None:
            raise BadOption("what a plan does to the memory is not known before it is carried out")
        return need(layout, module, workload, state)


WAYS: Final[dict[str, type[Way]]] = {"pipeline": Pipeline, "sharded": Sharded, "tensor": Tensor}
"""The ways by name."""


def parse_layout(text: str, options: Mapping[str, Any], ranks: int) -> Layout:
    """The layout that `text` means on `ranks` ranks.

    Args:
        text: one of `WAYS`, with `=N` for the ranks that hold one model together; and `data=N` for the
            teams, with a comma. A number that is left out follows from the others.
        options: of the way, by name.
        ranks: how many there are.

    Raises:
        UnknownName: there is no such way, or it has no such option.
        BadOption: the numbers do not make as many ranks, or a value cannot be used.
    """
    sizes = _sizes(text)
    way = _way(text, sizes)
    team, data = sizes[way], sizes.get(DATA, 1)
    if team is None and data is None:
        raise BadOption(f"--parallel {text} leaves both numbers open; give one, as in data=2,{way}")
    team = ranks // (data or 1) if team is None else team
    data = ranks // team if data is None else data
    known = options_of(way)
    for key in options:
        if key not in known:
            raise UnknownName("option", key, known, of=f"--parallel {way}")
    layout = Layout(way, team, data, WAYS[way](**options))
    if layout.ranks != ranks or team < 1:
        raise BadOption(
            f"--parallel {text} does not fit {ranks} rank{'' if ranks == 1 else 's'}: "
            f"{_hint(way, team, data, ranks)}"
        )
    if team < 2:
        raise BadOption(f"--parallel {text} on {ranks} rank leaves nothing to share; use -n 2 or more")
    return layout


def ranks_of(text: str) -> int | None:
    """The number of ranks that a layout asks for; None if that is left open.

    Raises:
        UnknownName, BadOption: it is no layout.
    """
    sizes = _sizes(text)
    team, data = sizes[_way(text, sizes)], sizes.get(DATA, 1)
    return team * data if team is not None and data is not None else None


def options_of(text: str) -> list[str]:
    """The names of the options that a layout has.

    Raises:
        UnknownName, BadOption: it is no layout.
    """
    return [field.name for field in fields(WAYS[_way(text, _sizes(text))])]


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
    from tutti.model_parallel.base import Whole

    if layout is None:
        return Whole(module, comm)
    return layout.options.portion(layout, comm, module, workload)


def _sizes(text: str) -> dict[str, int | None]:
    sizes: dict[str, int | None] = {}
    for word in text.split(","):
        name, equals, number = (piece.strip() for piece in word.partition("="))
        if name not in (DATA, *WAYS):
            raise UnknownName("way", name, [*WAYS, DATA], "Write it as data=2,tensor=2.", "--parallel")
        if name in sizes:
            raise BadOption(f"--parallel {text} has '{name}' twice; give each once, as in data=2,tensor=2")
        if equals and not (number.isdecimal() and int(number) >= 1):
            raise BadOption(f"--parallel {text} has {name}={number}; give a whole number from 1")
        sizes[name] = int(number) if equals else None
    return sizes


def _way(text: str, sizes: Mapping[str, int | None]) -> str:
    """The one way that a layout names."""
    ways = [name for name in sizes if name != DATA]
    if not ways:
        raise BadOption(
            f"--parallel {text} is data parallelism alone, which needs no --parallel; leave it out, or name "
            f"one of {', '.join(WAYS)} beside it"
        )
    if len(ways) > 1:
        raise BadOption(
            f"--parallel {text} has {' and '.join(ways)}; one model is shared in one way: take one of them, "
            f"and data beside it, as in data=2,{ways[0]}=2"
        )
    return ways[0]


def _hint(way: str, team: int, data: int, ranks: int) -> str:
    product = team * data
    if product and ranks % team == 0 and ranks > product:
        return f"it makes {product}; use -n {product}, or data={ranks // team},{way}={team}"
    return f"{data} x {team} is {product}; use -n {product or 2}, or numbers whose product is {ranks}"
