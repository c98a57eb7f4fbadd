"""The user's optimizer on weights of which every rank of a host has a copy: each rank moves a part for all.

    copy of rank 0   ├── moved here ───┼◀── written by rank 1 ─┤
    copy of rank 1   ├◀─ by rank 0 ────┼──── moved here ───────┤
    state            ├── of rank 0 ────┼──── of rank 1 ────────┤   once for the host, in shared memory
    counters         ├─ of rank 0 ─┤ ├─ of rank 1 ─┤              a cell for each rank and parameter

The user's object steps. While it does, its param groups list this rank's parts, and its state is that of the
parts; before and after, they are those of the user's parameters. A part is what one parameter has in this
rank's slice: the optimizers that are divided move each number by itself (`ELEMENTWISE`).
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
    """What a parameter has in this rank's slice of a flat vector.

    Attributes:
        parameter: what the optimizer sees.
        place: where it lies in the vector; with the gap behind the parameter, which is zero: the fused
            kernels round the last elements of an odd length differently.
    """

    parameter: nn.Parameter
    place: slice


@dataclass
class StepPlan:
    """A step of the parameters that have a gradient.

    Attributes:
        key: what it was made for.
        numbers: of the parameters, on all ranks.
        by_group: this rank's parts of them, by param group.
        writes: this rank's stretches of the weights, and the same of all other copies.
        kernels: what moves the parts of a group without the optimizer; None: the optimizer itself.
        fused: the groups that a fused kernel moves.
        new: the optimizer may make state in it that it has not had.
    """

    key: tuple[object, ...]
    numbers: frozenset[int]
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
        # This rank's parts, and the rank that has the beginning of each parameter that is divided.
        self._parts: dict[int, Part] = {}
        self._owners: dict[int, int] = {}
        # A vector like the weights; or, of counters, a row for each rank and a column for each parameter.
        self._vectors: dict[Entry, Tensor] = {}
        self._entries: defaultdict[int, dict[str, Entry]] = defaultdict(dict)
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
        """Return whether the state has been replaced, or the parts lack a parameter that may be trained."""
        replaced = self._optimizer.state is not self._whole or self._whole.changed()
        return replaced or not self._trainable() <= self._owners.keys()

    def _trainable(self) -> set[int]:
        listed = [p for group in self._optimizer.param_groups for p in group["params"] if p.requires_grad]
        return {self._number[id(p)] for p in listed if id(p) in self._number}

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
        self._entries, self._stepped, self._plan = defaultdict(dict), {}, None
        self._cut(sorted(self._trainable()))
        self._state.clear()
        self._add_entries(
            (number, name, value.dtype if isinstance(value, Tensor) else torch.float32)
            for number, entries in given.items()
            for name, value in entries.items()
        )
        for number, entries in given.items():
            if self._owners.get(number, 0) == self._node.rank:
                for name, value in entries.items():
                    vector = self._vectors[self._entries[number][name]]
                    if name in COUNTERS:
                        vector[:, number] = float(value)
                    else:
                        span = self._places[number][1]
                        view_like(vector[span], self._parameters[number]).copy_(value)
        self._node.barrier()
        for number, part in self._parts.items():
            for name in self._entries.get(number, ()):
                self._state[part.parameter][name] = self._cell(number, name, part)
        self._optimizer.state = self._whole
        self._whole.forget()
        # Nobody steps before all have what they begin with.
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
        numbers = frozenset(number for some in present for number in some)
        own = [[number for number in some if number in self._parts] for some in present]
        by_group = [[self._parts[number].parameter for number in some] for some in own]
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
        writes = list(self._make_writes(sorted(number for some in own for number in some)))
        new = any(self._stepped.get(number) != options for number in numbers)
        self._stepped.update(dict.fromkeys(numbers, options))
        self._plan = StepPlan(key, numbers, by_group, writes, kernels, fused, new)
        return self._plan

    def _make_writes(self, numbers: Iterable[int]) -> Iterator[tuple[Tensor, list[Tensor]]]:
        """Yield the stretches of these parameters, neighbours joined."""
        stretches: list[tuple[int, slice]] = []
        for number in numbers:
            flat, place = self._places[number][0], self._parts[number].place
            if stretches and stretches[-1][0] == flat and stretches[-1][1].stop == place.start:
                place = slice(stretches.pop()[1].start, place.stop)
            stretches.append((flat, place))
        for flat, place in stretches:
            copies = [copy[place] for copy in self._copies[flat]]
            yield copies.pop(self._node.rank), copies

    def _settle(self, plan: StepPlan) -> None:
        """Move the state that a step has made into shared memory (collective)."""
        plan.new = False
        parts = [(number, part) for number, part in self._parts.items() if number in plan.numbers]
        made = [
            (number, name, value.dtype)
            for number, part in parts
            for name, value in self._state.get(part.parameter, {}).items()
            if value is not None
        ]
        everyone = cast("list[list[tuple[int, str, torch.dtype]]]", self._node.all_gather_objects(made))
        self._add_entries(entry for theirs in everyone for entry in theirs)
        for number, part in parts:
            state = self._state.get(part.parameter, {})
            for name, value in list(state.items()):
                if value is not None:
                    state[name] = self._cell(number, name, part).copy_(value)

    def _add_entries(self, entries: Iterable[tuple[int, str, torch.dtype]]) -> None:
        """Note what the optimizer keeps for the parameters, and make memory for it (collective)."""
        for number, name, dtype in entries:
            entry = (name, self._places[number][0], dtype)
            self._entries[number][name] = entry
            if entry not in self._vectors:
                counts, length = (self._node.size, len(self._parameters)), len(self._flats[entry[1]].weights)
                shape = counts if name in COUNTERS else (length,)
                self._vectors[entry] = self._node.shared(*shape, dtype=dtype)

    def _cell(self, number: int, name: str, part: Part) -> Tensor:
        vector = self._vectors[self._entries[number][name]]
        return vector[self._node.rank, number] if name in COUNTERS else vector[part.place]

    def _cut(self, numbers: Iterable[int]) -> None:
        """Cut parameters, laid end to end with their gaps, into as many slices as there are ranks."""
        lengths = {number: -(-self._parameters[number].numel() // ALIGNMENT) for number in numbers}
        edges = [sum(lengths.values()) * edge // self._node.size for edge in range(self._node.size + 1)]
        begin, end = edges[self._node.rank : self._node.rank + 2]
        self._parts, self._owners = {}, {}
        at = 0
        for number, length in lengths.items():
            flat, span = self._places[number]
            self._owners[number] = bisect(edges, at) - 1
            first, last = max(begin - at, 0), min(end - at, length)
            at += length
            if first < last:
                place = slice(span.start + first * ALIGNMENT, span.start + last * ALIGNMENT)
                parameter = nn.Parameter(self._copies[flat][self._node.rank][place])
                parameter.grad = self._vector_of[flat][place]
                self._parts[number] = Part(parameter, place)

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
            owner, span = self._owners.get(number, 0), self._places[number][1]
            whole[self._parameters[number]] = {
                name: self._vectors[entry][owner, number]
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
