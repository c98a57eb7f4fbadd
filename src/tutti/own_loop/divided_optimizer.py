"""The user's optimizer on weights of which every rank of a host has a copy: each rank moves a part for all.

    copy of rank 0   ├── moved here ───┼◀── written by rank 1 ─┤
    copy of rank 1   ├◀─ by rank 0 ────┼──── moved here ───────┤
    state            ├── of rank 0 ────┼──── of rank 1 ────────┤   once for the host, in shared memory

It is the user's object that steps. While it does, its param groups list this rank's parts, and its state is
that of the parts; before and after, they are those of the user's parameters.

Parts are joined over as many neighbours as have a gradient, belong to one group and have come equally far:
the optimizers that can be used move each number by itself (`ELEMENTWISE`). State is kept in vectors like the
weights, so which parts there are may change from step to step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, cast

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

MOST_PLANS: Final = 16
"""Limit on the divisions kept: one for each set of parameters that has had gradients in a step."""


@dataclass
class ParameterStretch:
    """A stretch of the weights that the optimizer sees as one parameter.

    Attributes:
        parameter: it.
        group: of the optimizer.
        flat: the number of its vector.
        place: where.
        numbers: of the parameters that are joined there, on all ranks.
    """

    parameter: nn.Parameter
    group: int
    flat: int
    place: slice
    numbers: slice


@dataclass
class StepDivision:
    """The division of a step among the ranks.

    Attributes:
        parts: this rank's.
        by_group: its parameters, by group.
        state: the parts' state.
        writes: this rank's stretches of the weights, and the same of all other copies.
        kernels: what moves the parts of a group without the optimizer; None: the optimizer itself.
        fused: the groups that a fused kernel moves.
        stretches: the numbers of the parameters that are joined, on all ranks.
        new: nobody has stepped by it.
        counters: what the optimizer counts for a part, and its place for each of the part's parameters.
    """

    parts: list[ParameterStretch]
    by_group: list[list[nn.Parameter]]
    state: defaultdict[Any, State]
    writes: list[tuple[Tensor, list[Tensor]]]
    kernels: list[Kernel | None]
    fused: list[bool]
    stretches: list[slice]
    new: bool = True
    counters: list[tuple[Tensor, Tensor]] = field(default_factory=list)


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
        tables = sparse_tables(replica.module)
        self._divisible = self._number.keys() - {id(table) for table in tables}
        self._addresses = [
            (weights.data_ptr(), gradient.data_ptr())
            for weights, gradient in zip(self._weights, self._gradients, strict=True)
        ]
        self._reaches = [reach_of(vector) for vector in gradients]
        # By name and flat: a vector like the weights, or of counters a cell for each parameter.
        self._vectors: dict[str, dict[int, Tensor]] = {}
        self._has: dict[str, set[int]] = {}
        self._whole = WholeState(self._make_whole)
        self._divisions: dict[tuple[object, ...], StepDivision] = {}
        self._last: StepDivision | None = None

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
        """Go on from the state that the optimizer has been given, the same on every rank (collective)."""
        given = {
            self._number[id(key)]: {name: value for name, value in entries.items() if value is not None}
            for key, entries in self._optimizer.state.items()
            if id(key) in self._number
        }
        self._has, self._divisions, self._last = {}, {}, None
        kinds = {
            (name, self._places[number][0], value.dtype if isinstance(value, Tensor) else torch.float32)
            for number, entries in given.items()
            for name, value in entries.items()
        }
        self._allocate(kinds)
        for number, entries in given.items():
            flat, span = self._places[number]
            for name, value in entries.items():
                self._has.setdefault(name, set()).add(number)
                if self._node.rank:
                    continue  # it would write the same
                vector = self._vectors[name][flat]
                if name in COUNTERS:
                    vector[number] = float(value)
                else:
                    view_like(vector[span], self._parameters[number]).copy_(value)
        self._optimizer.state = self._whole
        self._whole.forget()
        self._node.barrier()

    def step(self, native: Callable[[], object]) -> object:
        """Move the weights of all ranks (collective); `native` is the optimizer's own step."""
        self._bring_gradients()
        division = self._division()
        if division.new or not all(division.kernels) or "found_inf" in vars(self._optimizer):
            with self._lent(division):
                found = native()
        else:
            found = None
            self._by_kernels(division)
        with torch.no_grad():
            if division.new:
                self._settle(division)
            for cells, counter in division.counters:
                cells.copy_(counter)
            for own, others in division.writes:
                for other in others:
                    other.copy_(own)
        self._whole.forget()
        self._node.barrier()
        return found

    @torch.no_grad()
    def _by_kernels(self, division: StepDivision) -> None:
        groups = self._optimizer.param_groups
        for kernel, group, parameters in zip(division.kernels, groups, division.by_group, strict=True):
            if parameters and kernel is not None:
                grads = [cast(Tensor, parameter.grad) for parameter in parameters]
                moved = kernel(group, parameters, grads, division.state)
                assert moved, "the first step by a division has made the state"

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
    def _lent(self, division: StepDivision) -> Iterator[None]:
        """Inside, the optimizer's groups and state are those of the parts."""
        optimizer = self._optimizer
        groups = optimizer.param_groups
        kept = [(group, group["params"], group.get("fused")) for group in groups]
        optimizer.state = division.state
        try:
            for group, parameters, fused in zip(groups, division.by_group, division.fused, strict=True):
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

    def _division(self) -> StepDivision:
        groups = self._optimizer.param_groups
        key = (
            *(0 if p.grad is None else id(p) for group in groups for p in group["params"]),
            *(len(group["params"]) for group in groups),
            *(bool(v) for group in groups for v in group.values() if isinstance(v, int | float)),
        )
        known = self._divisions.get(key)
        if known is not None and known is self._last:
            return known
        if known is None or not self._refresh(known):
            if len(self._divisions) >= MOST_PLANS:
                self._divisions.clear()
            known = self._divisions[key] = self._divide()
        self._last = known
        # Counters were read, which the step writes.
        self._node.barrier()
        return known

    def _refresh(self, division: StepDivision) -> bool:
        """Count on from where other divisions have come; whether what is joined has come equally far."""
        for stretch in division.stretches:
            if len({self._progress(number) for number in range(stretch.start, stretch.stop)}) > 1:
                return False
        for cells, counter in division.counters:
            counter.copy_(cells[0])
        return True

    def _divide(self) -> StepDivision:
        """Divide what has a gradient now."""
        groups = self._optimizer.param_groups
        group_of = {
            self._number[id(p)]: number
            for number, group in enumerate(groups)
            for p in group["params"]
            if p.grad is not None
        }
        stretches: list[list[int]] = []
        before: tuple[object, ...] = ()
        for number in sorted(group_of):
            kind = (group_of[number], self._places[number][0], self._progress(number))
            if stretches and stretches[-1][-1] == number - 1 and kind == before:
                stretches[-1].append(number)
            else:
                stretches.append([number])
            before = kind
        parts = list(self._own_parts(stretches, group_of))
        state: defaultdict[Any, State] = defaultdict(dict)
        for part in parts:
            held = self._state_of(part)
            if held:
                state[part.parameter] = held
        by_group = [
            [part.parameter for part in parts if part.group == number] for number in range(len(groups))
        ]
        # torch's fused kernels take parameters that are all new to them, or none of which is.
        fused = [
            is_fused(self._optimizer, group, group["params"]) and len({p in state for p in parameters}) < 2
            for group, parameters in zip(groups, by_group, strict=True)
        ]
        kernels = [
            KERNELS.get(type(self._optimizer)) if cheap and is_plain(group) else None
            for cheap, group in zip(fused, groups, strict=True)
        ]
        rank = self._node.rank
        writes = [
            (
                self._copies[part.flat][rank][part.place],
                [copy[part.place] for other, copy in enumerate(self._copies[part.flat]) if other != rank],
            )
            for part in parts
        ]
        joined = [slice(numbers[0], numbers[-1] + 1) for numbers in stretches]
        return StepDivision(parts, by_group, state, writes, kernels, fused, joined)

    def _own_parts(
        self, stretches: Iterable[list[int]], group_of: dict[int, int]
    ) -> Iterator[ParameterStretch]:
        """Cut the stretches into as many shares as there are ranks, and make the parts of this one."""
        places = []
        for numbers in stretches:
            flat, first = self._places[numbers[0]]
            last = self._places[numbers[-1]][1].stop
            places.append((flat, first.start, last, numbers))
        lines = sum(-(-(stop - start) // ALIGNMENT) for _, start, stop, _ in places)
        rank, size = self._node.rank, self._node.size
        begin, end = (lines * edge // size * ALIGNMENT for edge in (rank, rank + 1))
        at = 0
        for flat, start, stop, numbers in places:
            place = slice(max(start, start + begin - at), min(stop, start + end - at))
            at += -(-(stop - start) // ALIGNMENT) * ALIGNMENT
            if place.start < place.stop:
                parameter = nn.Parameter(self._copies[flat][rank][place])
                parameter.grad = self._vector_of[flat][place]
                yield ParameterStretch(
                    parameter, group_of[numbers[0]], flat, place, slice(numbers[0], numbers[-1] + 1)
                )

    def _progress(self, number: int) -> tuple[object, ...]:
        """The number of steps that the optimizer has made for a parameter; only equal ones can be joined."""
        names = sorted(name for name, numbers in self._has.items() if number in numbers)
        flat = self._places[number][0]
        return (*names, *(self._vectors[name][flat][number].item() for name in names if name in COUNTERS))

    def _state_of(self, part: ParameterStretch) -> State:
        first = part.numbers.start
        state: State = {}
        for name, numbers in self._has.items():
            if first in numbers:
                vector = self._vectors[name][part.flat]
                state[name] = vector[first].clone() if name in COUNTERS else vector[part.place]
        return state

    def _settle(self, division: StepDivision) -> None:
        """Lay out what the first step by a division has made (collective)."""
        division.new = False
        mine = [
            (name, part.flat, value.dtype, part.numbers.start, part.numbers.stop)
            for part in division.parts
            for name, value in division.state.get(part.parameter, {}).items()
            if value is not None
        ]
        gathered = self._node.all_gather_objects(mine)
        everyone = cast("list[list[tuple[str, int, torch.dtype, int, int]]]", gathered)
        self._allocate({(name, flat, dtype) for theirs in everyone for name, flat, dtype, _, _ in theirs})
        for theirs in everyone:
            for name, _, _, start, stop in theirs:
                self._has.setdefault(name, set()).update(range(start, stop))
        for part in division.parts:
            held = division.state.get(part.parameter, {})
            for name, value in list(held.items()):
                if value is None:
                    continue
                vector = self._vectors[name][part.flat]
                if name in COUNTERS:
                    division.counters.append((vector[part.numbers], value))
                elif vector[part.place].data_ptr() != value.data_ptr():
                    held[name] = vector[part.place].copy_(value)

    def _allocate(self, kinds: Iterable[tuple[str, int, torch.dtype]]) -> None:
        """Set memory aside for state that has none of its type yet (collective)."""
        for name, flat, dtype in sorted(kinds, key=str):
            vectors = self._vectors.setdefault(name, {})
            # What torch loads may be of another type than what it has made: NAdam's products are.
            if flat not in vectors or vectors[flat].dtype != dtype:
                length = len(self._parameters) if name in COUNTERS else len(self._flats[flat].weights)
                vectors[flat] = self._node.shared(length, dtype=dtype)

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
        """The state of all parameters, as torch has it, where it lies."""
        whole: dict[nn.Parameter, State] = {}
        for number, parameter in enumerate(self._parameters):
            flat, span = self._places[number]
            for name in self._has:
                if number not in self._has[name]:
                    continue
                vector = self._vectors[name][flat]
                value = vector[number] if name in COUNTERS else view_like(vector[span], self._weights[number])
                whole.setdefault(parameter, {})[name] = value
        return whole

    @torch.no_grad()
    def _make_whole(self) -> dict[Any, State]:
        """A copy of the state of all parameters."""
        return {
            parameter: {name: value.clone() for name, value in state.items()}
            for parameter, state in self._live_state().items()
        }
