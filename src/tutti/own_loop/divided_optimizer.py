"""The user's optimizer on weights of which every rank of a host has a copy: each rank moves a part for all.

    copy of rank 0   ├── moved here ───┼◀── written by rank 1 ─┤
    copy of rank 1   ├◀─ by rank 0 ────┼──── moved here ───────┤
    state            ├── of rank 0 ────┼──── of rank 1 ────────┤   once for the host, in shared memory
    counters         ├─ of rank 0 ─┤ ├─ of rank 1 ─┤              a cell for each rank and parameter

The user's object steps. While it does, its param groups list this rank's parts, and its state is that of the
parts; before and after, they are those of the user's parameters. The optimizers that are divided move each
number by itself (`ELEMENTWISE`): neighbours are joined into a run, and a run is cut anywhere, until a step
comes that moves some of its parameters and not the others.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from tutti.comm.base import Communicator
from tutti.optim.kernels import KERNELS, Kernel
from tutti.optim.runs import COUNTERS, is_elementwise, is_fused, is_plain
from tutti.optim.sparse import sparse_tables
from tutti.optim.state import add_whole
from tutti.optim.whole_state import State, WholeState
from tutti.replica import ALIGNMENT, Replica, is_there, reach_of, stretch_like, view_like
from tutti.state import Held

Entry = tuple[str, int, torch.dtype]
"""What the optimizer keeps under a name, for parameters of a flat vector, in a dtype."""


@dataclass(frozen=True)
class Part:
    """What this rank moves of a run of parameters.

    Attributes:
        parameter: what the optimizer sees.
        run: the numbers of the parameters.
        flat: the number of their vector.
        place: where it lies in the vector; with the gap behind the parameters, which is zero: the fused
            kernels round the last elements of an odd length differently.
    """

    parameter: nn.Parameter
    run: range
    flat: int
    place: slice


@dataclass
class StepPlan:
    """A step of the parameters that have a gradient.

    Attributes:
        key: what it was made for.
        parts: this rank's.
        by_group: what the optimizer sees of them, by param group.
        writes: this rank's stretches of the weights, and the same of all other copies.
        kernels: what moves the parts of a group without the optimizer; None: the optimizer itself.
        fused: the groups that a fused kernel moves.
        new: the optimizer may make state in it that it has not had.
    """

    key: tuple[object, ...]
    parts: list[Part]
    by_group: list[list[nn.Parameter]]
    writes: list[tuple[Tensor, list[Tensor]]]
    kernels: list[Kernel | None]
    fused: list[bool]
    new: bool


class DividedOptimizer:
    """Steps the user's optimizer, divided over the ranks of a host.

    Args:
        optimizer: the user's.
        replica: the model.
        copies: for each of the replica's vectors of weights, those of all ranks of this host.
        gradients: vectors of the same lengths for the gradients, which may hold them already.
        node: these ranks.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        replica: Replica,
        copies: Sequence[Sequence[Tensor]],
        gradients: Sequence[Tensor],
        node: Communicator,
    ) -> None:
        self._optimizer, self._node = optimizer, node
        self._flats, self._copies, self._vector_of = replica.flats, copies, gradients
        self._parameters = [parameter for flat in replica.flats for parameter in flat.parameters]
        self._places = [(number, span) for number, flat in enumerate(replica.flats) for span in flat.spans]
        self._number = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        self._gradients = [
            view_like(gradients[flat][span], parameter)
            for parameter, (flat, span) in zip(self._parameters, self._places, strict=True)
        ]
        self._weights = [
            stretch_like(self._flats[flat].weights, span, parameter)
            for parameter, (flat, span) in zip(self._parameters, self._places, strict=True)
        ]
        self._addresses = [
            (weights.data_ptr(), gradient.data_ptr())
            for weights, gradient in zip(self._weights, self._gradients, strict=True)
        ]
        self._reaches = [reach_of(vector) for vector in gradients]
        tables = sparse_tables(replica.module)
        self._divisible = self._number.keys() - {id(table) for table in tables}
        self._runs: list[range] = []
        self._parts: list[Part] = []
        # The parameters that are never joined with the one before them.
        self._apart: set[int] = set()
        # Where the counters of a parameter are: the rank and the column; if nowhere else, in its own column.
        self._homes: dict[int, tuple[int, int]] = {}
        # A vector like the weights; or, of counters, a row for each rank and a column for each parameter.
        self._vectors: dict[Entry, Tensor] = {}
        self._entries: dict[int, dict[str, Entry]] = {}
        self._state: defaultdict[Any, State] = defaultdict(dict)
        self._whole = WholeState(self._make_whole)
        # For the parameters that have been stepped: the options that were set then.
        self._stepped: dict[int, tuple[bool, ...]] = {}
        self._plan: StepPlan | None = None

    def fits(self, native: Callable[..., object]) -> bool:
        """Return whether this optimizer, as it is now, may be divided.

        Args:
            native: its own step.
        """
        groups = self._optimizer.param_groups
        # What looks on is to see the program's parameters, and all that the step has made of them.
        if self._is_watched(native):
            return False
        # With `foreach`, and with a scale, torch changes the gradients in a step, which are everyone's.
        if "grad_scale" in vars(self._optimizer):
            return False
        return is_elementwise(self._optimizer) and all(
            not group.get("foreach")
            and not group.get("differentiable")
            and not group.get("capturable")
            and all(
                id(p) in self._divisible and p.is_floating_point() and p.numel() and p.is_cpu
                for p in group["params"]
            )
            for group in groups
        )

    def changed(self) -> bool:
        """Return whether the optimizer's state has been replaced since the last step."""
        return self._optimizer.state is not self._whole or self._whole.changed()

    def release(self) -> None:
        """Give the optimizer a state of its own, as it steps by itself from now on."""
        if self._optimizer.state is self._whole:
            self._optimizer.state = defaultdict(dict, self._whole.items())

    @torch.no_grad()
    def adopt(self) -> None:
        """Divide the optimizer and the state that it has now, the same on every rank (collective)."""
        given = {
            self._number[id(key)]: {name: value for name, value in entries.items() if value is not None}
            for key, entries in self._optimizer.state.items()
            if id(key) in self._number
        }
        self._entries, self._stepped, self._plan = {}, {}, None
        self._runs, self._parts, self._homes = [], [], {}
        self._state.clear()
        self._add_entries(
            (number, name, value.dtype if isinstance(value, Tensor) else torch.float32)
            for number, entries in given.items()
            for name, value in entries.items()
        )
        if self._node.rank == 0:  # the others would write the same
            for number, entries in given.items():
                for name, value in entries.items():
                    vector = self._vectors[self._entries[number][name]]
                    if name in COUNTERS:
                        vector[:, number] = float(value)
                    else:
                        span = self._places[number][1]
                        view_like(vector[span], self._parameters[number]).copy_(value)
        self._optimizer.state = self._whole
        self._whole.forget()
        self._node.barrier()

    def step(self, native: Callable[[], object]) -> object:
        """Move the weights of all ranks (collective); `native` is the optimizer's own step."""
        self._bring_gradients()
        plan = self._plan_step()
        if plan.new or not all(plan.kernels) or "found_inf" in vars(self._optimizer):
            with self._lent(plan):
                found = native()
        else:
            found = None
            self._by_kernels(plan)
        with torch.no_grad():
            if plan.new:
                self._settle(plan)
            for own, others in plan.writes:
                for other in others:
                    other.copy_(own)
        self._whole.forget()
        self._node.barrier()
        return found

    @torch.no_grad()
    def _by_kernels(self, plan: StepPlan) -> None:
        groups = self._optimizer.param_groups
        for kernel, group, parameters in zip(plan.kernels, groups, plan.by_group, strict=True):
            if parameters and kernel is not None:
                grads = [cast(Tensor, parameter.grad) for parameter in parameters]
                moved = kernel(group, parameters, grads, self._state)
                assert moved, "the first step by a plan has made the state"

    def _is_watched(self, native: Callable[..., object]) -> bool:
        """Return whether there are hooks of the step, or the program has wrapped it."""
        held, own = vars(self._optimizer), type(self._optimizer).step
        # A scheduler's wrapper only notes that there was a step.
        scheduled = getattr(native, "_wrapped_by_lr_sched", False)
        called = getattr(native, "__wrapped__" if scheduled else "__func__", None)
        return bool(
            called is not own
            or held.get("_optimizer_step_pre_hooks")
            or held.get("_optimizer_step_post_hooks")
            or torch_optimizer._global_optimizer_pre_hooks
            or torch_optimizer._global_optimizer_post_hooks
        )

    @contextmanager
    def _lent(self, plan: StepPlan) -> Iterator[None]:
        """Inside, the optimizer's groups and state are those of the parts."""
        optimizer = self._optimizer
        groups = optimizer.param_groups
        kept = [(group, group["params"], group.get("fused")) for group in groups]
        optimizer.state = self._state
        try:
            for group, parameters, fused in zip(groups, plan.by_group, plan.fused, strict=True):
                group["params"] = parameters
                if fused:
                    group["fused"] = True
            yield
        finally:
            for group, parameters, option in kept:
                group["params"] = parameters
                if "fused" in group:
                    group["fused"] = option
            optimizer.state = self._whole

    @torch.no_grad()
    def bring_weights(self) -> None:
        """Have the weights where the parts are, if the loop has put others in their place.

        To be called before the ranks meet for the step: after that, others write to this rank's copy.
        """
        moved = [
            # A copy: it may lie where another one's weights, or its own in another order, are to be.
            (number, parameter, parameter.detach().clone())
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            for number in (self._number[id(parameter)],)
            if not is_there(parameter, self._weights[number], self._addresses[number][0])
        ]
        for number, parameter, weights in moved:
            parameter.data = self._weights[number].copy_(weights)

    @torch.no_grad()
    def _bring_gradients(self) -> None:
        elsewhere = [
            (number, parameter.grad)
            for group in self._optimizer.param_groups
            for parameter in group["params"]
            for number in (self._number[id(parameter)],)
            if parameter.grad is not None
            and not is_there(parameter.grad, self._gradients[number], self._addresses[number][1])
        ]
        for _, gradient in elsewhere:
            if any(gradient.data_ptr() in reach for reach in self._reaches):
                # It lies where another one is to be, or in another order; and stays as it is for the loop.
                gradient.data = gradient.clone()
        for number, gradient in elsewhere:
            self._gradients[number].copy_(gradient)

    def _plan_step(self) -> StepPlan:
        """Return the plan for what has a gradient now."""
        groups = self._optimizer.param_groups
        options = tuple(bool(v) for group in groups for v in group.values() if isinstance(v, int | float))
        present = [[self._number[id(p)] for p in group["params"] if p.grad is not None] for group in groups]
        key = (*map(tuple, present), options)
        if self._plan is not None and self._plan.key == key:
            return self._plan
        group_of = {number: group for group, some in enumerate(present) for number in some}
        if not self._keeps_runs(group_of):
            self._cut(group_of)
        parts = [part for part in self._parts if part.run[0] in group_of]
        by_group = [
            [part.parameter for part in parts if group_of[part.run[0]] == group]
            for group in range(len(groups))
        ]
        # torch's fused kernels take parameters that are all new to them, or none of which is.
        fused = [
            is_fused(self._optimizer, group, group["params"])
            and len({p in self._state for p in parameters}) < 2
            for group, parameters in zip(groups, by_group, strict=True)
        ]
        kernels = [
            KERNELS.get(type(self._optimizer)) if cheap and is_plain(group) else None
            for cheap, group in zip(fused, groups, strict=True)
        ]
        copies = [[copy[part.place] for copy in self._copies[part.flat]] for part in parts]
        writes = [(some.pop(self._node.rank), some) for some in copies]
        new = any(self._stepped.get(number) != options for number in group_of)
        self._stepped.update(dict.fromkeys(group_of, options))
        self._plan = StepPlan(key, parts, by_group, writes, kernels, fused, new)
        return self._plan

    def _keeps_runs(self, group_of: Mapping[int, int]) -> bool:
        """Return whether each run moves as one; else note where it is to be parted."""
        apart = {
            number
            for run in self._runs
            for number in run[1:]
            if group_of.get(number) != group_of.get(number - 1)
        }
        self._apart |= apart
        return not apart and group_of.keys() <= self._homes.keys()

    @torch.no_grad()
    def _cut(self, group_of: Mapping[int, int]) -> None:
        """Join parameters into runs, and cut these, laid end to end, into a slice for each rank (collective).

        Args:
            group_of: the param group of each parameter that has a gradient.
        """
        groups, rank = self._optimizer.param_groups, self._node.rank
        trained = {self._number[id(p)] for group in groups for p in group["params"] if p.requires_grad}
        counted = {number: self._counters(number) for number in self._entries}
        self._node.barrier()  # from here on each rank writes its own row
        for number, counters in counted.items():
            for entry, value in counters.items():
                self._vectors[entry][rank, number] = value
        runs: list[range] = []
        before: object = None
        for number in sorted(trained | group_of.keys()):
            entries = set(self._entries.get(number, {}).values())
            kind = (self._places[number][0], group_of.get(number), entries, counted.get(number))
            joins = runs and runs[-1].stop == number and kind == before and number not in self._apart
            start = runs.pop().start if joins else number
            runs.append(range(start, number + 1))
            before = kind
        lengths = [sum(-(-self._parameters[number].numel() // ALIGNMENT) for number in run) for run in runs]
        edges = [sum(lengths) * edge // self._node.size for edge in range(self._node.size + 1)]
        self._runs, self._parts, self._homes = runs, [], {}
        self._state.clear()
        at = 0
        for run, length in zip(runs, lengths, strict=True):
            self._homes.update(dict.fromkeys(run, (bisect(edges, at) - 1, run[0])))
            first, last = max(edges[rank] - at, 0), min(edges[rank + 1] - at, length)
            at += length
            if first < last:
                self._add_part(run, first * ALIGNMENT, last * ALIGNMENT)

    def _add_part(self, run: range, first: int, last: int) -> None:
        flat, span = self._places[run[0]]
        place = slice(span.start + first, span.start + last)
        parameter = nn.Parameter(self._copies[flat][self._node.rank][place])
        parameter.grad = self._vector_of[flat][place]
        part = Part(parameter, run, flat, place)
        self._parts.append(part)
        for name in self._entries.get(run[0], ()):
            self._state[parameter][name] = self._cell(part, name)

    def _counters(self, number: int) -> dict[Entry, float]:
        """Return what the optimizer has counted for a parameter."""
        home = self._homes.get(number, (self._node.rank, number))
        entries = self._entries.get(number, {}).values()
        return {entry: self._vectors[entry][home].item() for entry in entries if entry[0] in COUNTERS}

    def _settle(self, plan: StepPlan) -> None:
        """Move the state that a step has made into shared memory (collective)."""
        plan.new = False
        made = [
            (number, name, value.dtype)
            for part in plan.parts
            for name, value in self._state.get(part.parameter, {}).items()
            if value is not None
            for number in part.run
        ]
        everyone = cast("list[list[tuple[int, str, torch.dtype]]]", self._node.all_gather_objects(made))
        self._add_entries(entry for theirs in everyone for entry in theirs)
        for part in plan.parts:
            state = self._state.get(part.parameter, {})
            for name, value in list(state.items()):
                if value is not None:
                    state[name] = self._cell(part, name).copy_(value)

    def _add_entries(self, entries: Iterable[tuple[int, str, torch.dtype]]) -> None:
        """Note what the optimizer keeps for the parameters, and make memory for it (collective)."""
        for number, name, dtype in entries:
            entry = (name, self._places[number][0], dtype)
            self._entries.setdefault(number, {})[name] = entry
            if entry not in self._vectors:
                counts, length = (self._node.size, len(self._parameters)), len(self._flats[entry[1]].weights)
                shape = counts if name in COUNTERS else (length,)
                self._vectors[entry] = self._node.shared(*shape, dtype=dtype)

    def _cell(self, part: Part, name: str) -> Tensor:
        vector = self._vectors[self._entries[part.run[0]][name]]
        return vector[self._node.rank, part.run[0]] if name in COUNTERS else vector[part.place]

    def held(self, names: Mapping[nn.Parameter, str]) -> Held:
        """Return the state of some parameters, where it lies.

        Args:
            names: of these.
        """
        held = Held()
        for parameter, state in self._live_state().items():
            if parameter in names:
                add_whole(held, names[parameter], state)
        return held

    def _live_state(self) -> dict[nn.Parameter, State]:
        """Return the state of all parameters, as torch has it, where it lies."""
        whole: dict[nn.Parameter, State] = {}
        for number, entries in sorted(self._entries.items()):
            home, span = self._homes.get(number, (self._node.rank, number)), self._places[number][1]
            whole[self._parameters[number]] = {
                name: self._vectors[entry][home]
                if name in COUNTERS
                else view_like(self._vectors[entry][span], self._weights[number])
                for name, entry in entries.items()
            }
        return whole

    @torch.no_grad()
    def _make_whole(self) -> dict[Any, State]:
        """A copy of the state of all parameters."""
        return {
            parameter: {name: value.clone() for name, value in state.items()}
            for parameter, state in self._live_state().items()
        }
