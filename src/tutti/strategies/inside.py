"""Workers of several ranks: a worker's ranks make each step together, and workers meet by a strategy.

    host a   rank 0   backward │ sum 0  step 0 ─────┐           │ next forward
             rank 1   backward │ sum 1  step 1 ──┐  │ exchange  │ next forward
                               A                 │  │           B
    host b   rank 2   backward │ sum 0  step 0 ──│──┘           │ next forward
             rank 3   backward │ sum 1  step 1 ──┘              │ next forward

The weights of a worker exist once, in memory that its ranks share, and are cut between parameters into one
part per rank. Barrier A: the gradients of the worker's ranks are complete. Each rank then sums its part of
them, and is a worker of the strategy for this part only: it has the optimizer's state for it, and exchanges
with the ranks that have the same part in other workers. So the link between hosts carries each weight once,
however many ranks a host has. Barrier B: every part of the weights is updated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import KW_ONLY, dataclass
from typing import cast

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from tutti.comm.base import Communicator, Group
from tutti.errors import BadOption
from tutti.optim.sharded import own_slices
from tutti.replica import Flat, Gradients, Missing, NormShare, Replica, squared_norm
from tutti.state import Saved, State
from tutti.strategies.base import Clip, Strategy, Worker
from tutti.strategies.gradient_sum import JointlyMissing, add_up
from tutti.strategies.options import choice, whole


@dataclass(frozen=True)
class GroupedStrategy(Strategy):
    """A strategy whose workers may be groups of ranks, and step at the same time."""

    _: KW_ONLY
    inside: str = choice("none", "how the ranks of a host are one worker", ("none", "sync"))
    group: int = whole(0, "with inside=sync, ranks of a worker (0: all of its host)", least=0)

    @override
    def __post_init__(self) -> None:
        """Refuse a group size without `inside`."""
        super().__post_init__()
        if self.group and self.inside == "none":
            raise BadOption(f"{self.as_given('group')}, which has an effect with inside=sync alone")

    @override
    def groups(self, comm: Communicator) -> Group | None:
        if self.inside == "none":
            return None
        sizes = sorted({*cast("list[int]", comm.all_gather_objects(comm.node.size))})
        size = self.group or sizes[0]
        if any(ranks % size if self.group else ranks != size for ranks in sizes):
            words = " and ".join(map(str, sizes))
            raise BadOption(
                f"{self.as_given('inside')}, but a host has {words} ranks, which are no workers of "
                f"{size}; give every host the same number, and '--strategy.group' one that divides it"
            )
        return Group.of(comm, size)


class GroupWorker(Worker):
    """One rank of a group that is one worker; it runs the strategy's worker for its part of the weights."""

    def __init__(
        self, strategy: Strategy, replica: Replica, group: Group, optimizer: Optimizer, clip: Clip
    ) -> None:
        super().__init__()
        self._ranks = ranks = group.ranks
        slices = [own_slices(flat, ranks.size, optimizer, whole=True)[ranks.rank] for flat in replica.flats]
        totals = [flat.rows[0] for flat in replica.flats]
        self._missing = JointlyMissing(replica, ranks, totals, slices)
        self._rows = [
            [row[own] for row in flat.rows] for flat, own in zip(replica.flats, slices, strict=True)
        ]
        part = copy(replica)
        part.flats = tuple(
            _part_of(flat, own)
            for flat, own in zip(replica.flats, slices, strict=True)
            if own.start < own.stop
        )
        part.gradients = _SummedGradients(part.flats, self._missing.find, ranks)
        self._worker = strategy.worker(part, group.lane, optimizer, clip)
        self.traffic, self.updating = self._worker.traffic, self._worker.updating
        self.restarts = self._worker.restarts

    @override
    def step(self) -> None:
        self._missing.note()
        self._meet()
        with torch.no_grad():
            for total, *others in self._rows:
                add_up(total, others)
        self._worker.step()
        self._meet()

    @override
    def skip(self) -> None:
        self._meet()
        self._worker.skip()
        self._meet()

    def _meet(self) -> None:
        """Wait for the other ranks of this worker."""
        began = self._ranks.clock()
        self._ranks.barrier()
        self.traffic.wait_s += self._ranks.clock() - began

    @override
    def settle(self) -> None:
        self._worker.settle()
        self._ranks.barrier()

    @override
    def resume(self) -> None:
        self._ranks.barrier()  # Others may still evaluate.
        self._worker.resume()
        self._ranks.barrier()

    @override
    def state(self) -> State:
        return self._worker.state()

    @override
    def load_state(self, saved: Saved) -> None:
        self._worker.load_state(saved)
        self._ranks.barrier()

    @override
    def finish(self) -> None:
        self._worker.finish()
        self._ranks.barrier()


class _SummedGradients(Gradients):
    """The sums of a worker's gradients, on the rank that has these parameters."""

    def __init__(
        self, flats: Sequence[Flat], find_missing: Callable[[], Missing], ranks: Communicator
    ) -> None:
        super().__init__(flats, ())
        self._find_missing = find_missing
        self.share = NormShare(lambda _: True, self._add_up)
        self._ranks = ranks

    @override
    def missing(self) -> Missing:
        return self._find_missing()

    @override
    def squared_norm(self) -> float:
        return self._add_up(squared_norm(self.vectors()))

    def _add_up(self, squares: float) -> float:
        total = torch.tensor([squares], dtype=torch.float64)
        self._ranks.all_reduce(total)
        return total.item()


def _part_of(flat: Flat, own: slice) -> Flat:
    """Return whole parameters of a vector as a vector, with the first row of gradients."""
    held = [
        (name, parameter, slice(span.start - own.start, span.stop - own.start))
        for name, parameter, span in zip(flat.names, flat.parameters, flat.spans, strict=True)
        if own.start <= span.start < own.stop
    ]
    names, parameters, spans = zip(*held, strict=True)
    total: Tensor = flat.rows[0][own]
    return Flat(flat.weights[own], total, total.unsqueeze(0), names, parameters, spans)
