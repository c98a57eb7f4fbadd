"""The user's optimizer on weights that every rank of a host has: each rank moves a part for all.

    copy of rank 0   ├── moved here ───┼◀── written by rank 1 ─┤
    copy of rank 1   ├◀─ by rank 0 ────┼──── moved here ───────┤
    state            ├── of rank 0 ────┼──── of rank 1 ────────┤   once for the host, in shared memory

Each rank steps copies of the user's optimizer on its slice, as in `tutti.optim.sharded`. The program sees
views of the state of all parameters in `optimizer.state`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.optim.sharded import FlatPiece, announce, groups_of
from tutti.optim.sliced_optimizer import COUNTERS, GroupOptimizer, is_elementwise
from tutti.optim.sparse import sparse_tables
from tutti.replica import ALIGNMENT, NONE_MISSING, Missing, Replica, stretch_like, view_like

Entry = tuple[str, int, torch.dtype]
"""An entry of the optimizer's state: its name, the number of the flat vector, and its dtype."""


class GradientCell(NamedTuple):
    """The places of a parameter's weights and of its gradient, with their addresses."""

    parameter: nn.Parameter
    weights: Tensor
    address: int
    gradient: Tensor
    gradient_address: int
    stride: tuple[int, ...]


class DividedOptimizer:
    """Steps the user's optimizer, divided over the ranks `node` of a host."""

    def __init__(
        self,
        optimizer: Optimizer,
        replica: Replica,
        copies: Sequence[Sequence[Tensor]],  # for each vector of weights, those of all ranks of this host
        gradients: Sequence[Tensor],  # vectors of the same lengths, which may hold the gradients already
        node: Communicator,
    ) -> None:
        self._optimizer, self._node = optimizer, node
        self._flats, self._copies, self._vector_of = replica.flats, copies, gradients
        self._parameters = [parameter for flat in replica.flats for parameter in flat.parameters]
        self._places = [(number, span) for number, flat in enumerate(replica.flats) for span in flat.spans]
        self._number = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        views = [
            view_like(gradients[flat][span], parameter)
            for parameter, (flat, span) in zip(self._parameters, self._places, strict=True)
        ]
        self._weights = [
            stretch_like(self._flats[flat].weights, span, parameter)
            for parameter, (flat, span) in zip(self._parameters, self._places, strict=True)
        ]
        self._slots = [
            GradientCell(
                parameter, weights, weights.data_ptr(), gradient, gradient.data_ptr(), gradient.stride()
            )
            for parameter, weights, gradient in zip(self._parameters, self._weights, views, strict=True)
        ]
        tables = sparse_tables(replica.module)
        self._divisible = {
            id(p) for p in self._parameters if p.is_floating_point() and p.numel() and p.is_cpu
        } - {id(table) for table in tables}
        self._runs: list[tuple[int, GroupOptimizer]] = []
        self._group_of: dict[nn.Parameter, int] = {}
        # At the last division: the parameters by groups, and the frozen ones.
        self._listed: list[list[int]] = []
        self._frozen: list[nn.Parameter] = []
        self._moved: list[GradientCell] = []
        # A vector like the weights; or, of counters, a cell for each parameter.
        self._vectors: dict[Entry, Tensor] = {}
        self._seen: dict[Entry, Tensor] = {}  # the same, as the program gets it
        self._entries: dict[int, dict[str, Entry]] = {}
        self._state: dict[nn.Parameter, dict[str, Tensor]] | None = None
        # The optimizer's counters in this rank's slice, with their cells.
        self._counters: list[tuple[Tensor, Tensor]] = []
        # This rank's stretches of the weights, and the same of all other copies.
        self._writes: list[tuple[Tensor, list[Tensor]]] = []
        # At the last step: the parameters without a gradient, and which options were set.
        self._missing: Missing = NONE_MISSING
        self._options: list[bool] | None = None

    def fits(self, native: Callable[..., object]) -> bool:
        """Return whether this optimizer, whose own step is `native`, may be divided as it is now."""
        groups = self._optimizer.param_groups
        # Hooks are to see the program's parameters, all of them moved.
        if self._is_watched(native):
            return False
        # With `foreach`, and with a scale, torch's step changes the gradients, which all ranks share.
        if vars(self._optimizer).keys() & {"grad_scale", "found_inf"}:
            return False
        return is_elementwise(self._optimizer) and all(
            not (group.get("foreach") or group.get("differentiable") or group.get("capturable"))
            and self._divisible.issuperset(map(id, group["params"]))
            for group in groups
        )

    def changed(self) -> bool:
        """Return whether the program has replaced values in the optimizer's state since the last step.

        Raise BadOption if it has changed a value in place, which all ranks of the host share.
        """
        if self._state is None:
            return True
        if any(vector._version for vector in self._seen.values()):
            raise BadOption(
                "the optimizer's state was changed in place, and the ranks have it in one memory; give the "
                "optimizer new tensors (state[p] = ...), or use optimizer.load_state_dict()"
            )
        # Dictionaries compare by identity first: if nothing has changed, no number is compared.
        now = {key: kept for key, kept in self._optimizer.state.items() if kept}
        try:
            return now != self._state
        except RuntimeError:  # two tensors were compared: one was replaced
            return True

    def release(self) -> None:
        """Give the optimizer a state in its own memory, for its own step."""
        if self._state is not None:
            for parameter, kept in self._optimizer.state.items():
                self._optimizer.state[parameter] = {name: value.clone() for name, value in kept.items()}
            self._state = None

    @torch.no_grad()
    def adopt(self) -> None:
        """Divide the optimizer and its current state, the same on every rank (collective)."""
        self._group_of = groups_of(self._optimizer)
        self._listed = self._list()
        listed = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        self._frozen = [parameter for parameter in listed if parameter not in self._group_of]
        self._moved = [slot for slot in self._slots if slot.parameter in self._group_of]
        self._runs = [
            (number, run)
            for number, (flat, gradients) in enumerate(zip(self._flats, self._vector_of, strict=True))
            for run in FlatPiece(self._optimizer, flat, gradients, self._own_slice(number)).runs
        ]
        self._entries, self._options = {}, None
        self._settle()

    def step(self) -> None:
        """Move the weights of all ranks (collective)."""
        if self._list() != self._listed or any(p.requires_grad or p.grad is not None for p in self._frozen):
            self.adopt()
        missing = self._bring_gradients()
        for _, run in self._runs:
            run.step(missing)
        # With other options the optimizer may keep more state.
        groups = self._optimizer.param_groups
        options = [bool(v) for group in groups for v in group.values() if isinstance(v, (int, float))]
        if missing != self._missing or options != self._options:
            self._missing, self._options = missing, options
            self._settle()
        for cells, counter in self._counters:
            cells.copy_(counter)
        for own, others in self._writes:
            for other in others:
                other.copy_(own)
        announce(self._optimizer)
        self._node.barrier()

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

    def _list(self) -> list[list[int]]:
        return [list(map(id, group["params"])) for group in self._optimizer.param_groups]

    def bring_weights(self) -> None:
        """Copy weights that the loop has put elsewhere (`p.data = other`) to their places, and point there.

        Call this before the ranks meet for the step: after that, others write to this rank's copy.
        """
        for slot in self._slots:
            if slot.parameter.data_ptr() != slot.address:
                slot.parameter.data = slot.weights.copy_(slot.parameter.detach())

    def _bring_gradients(self) -> Missing:
        """Copy gradients that lie elsewhere to their places; return the parameters without one."""
        missing = []
        for slot in self._moved:
            gradient = slot.parameter.grad
            if gradient is None:
                missing.append(slot.parameter)
            elif gradient.data_ptr() != slot.gradient_address or gradient.stride() != slot.stride:
                slot.gradient.copy_(gradient)
        return frozenset(missing)

    def _own_slice(self, number: int) -> slice:
        """Return this rank's slice of a flat vector: each rank moves about as much."""
        flat = self._flats[number]
        every = zip(flat.parameters, flat.spans, strict=True)
        spans = [span for parameter, span in every if parameter in self._group_of]
        lines = [-(-(span.stop - span.start) // ALIGNMENT) for span in spans]  # no two ranks write to one
        edges = [0, 0]
        for side in (0, 1):
            left = sum(lines) * (self._node.rank + side) // self._node.size
            for span, length in zip(spans, lines, strict=True):
                edges[side] = span.start + min(left, length) * ALIGNMENT
                left -= length
                if left <= 0:
                    break
        return slice(*edges)

    def _settle(self) -> None:
        """Move the state that a step has created into shared memory (collective)."""
        kept = [
            (flat, one, run.optimizer.state.get(parameter, {}))
            for flat, run in self._runs
            for parameter, one in zip(run.parameters, run.slices, strict=True)
        ]
        made = [
            (self._number[id(one.parameter)], name, value.dtype)
            for _, one, state in kept
            for name, value in state.items()
            if value is not None
        ]
        everyone = cast("list[list[tuple[int, str, torch.dtype]]]", self._node.all_gather_objects(made))
        self._add_entries(entry for theirs in everyone for entry in theirs)
        self._counters, self._writes = [], []
        for flat, one, state in kept:
            number = self._number[id(one.parameter)]
            for name, value in state.items():
                if value is not None:
                    vector = self._vectors[self._entries[number][name]]
                    if name in COUNTERS:
                        self._counters.append((vector[number], value))
                    else:
                        state[name] = vector[one.place].copy_(value)
            if one.parameter not in self._missing:
                copies = [copy[one.place] for copy in self._copies[flat]]
                self._writes.append((copies.pop(self._node.rank), copies))
        self._show()

    def _show(self) -> None:
        """Give the optimizer views of the state of all parameters, as torch has it."""
        # With version counters separate from the vectors': these count the program's changes.
        self._seen = {entry: vector.data for entry, vector in self._vectors.items()}
        self._state = {
            self._parameters[number]: {
                name: self._seen[entry][number]
                if name in COUNTERS
                else view_like(self._seen[entry][self._places[number][1]], self._weights[number])
                for name, entry in entries.items()
            }
            for number, entries in sorted(self._entries.items())
        }
        self._optimizer.state = defaultdict(dict)
        self._optimizer.state.update({parameter: dict(kept) for parameter, kept in self._state.items()})

    def _add_entries(self, entries: Iterable[tuple[int, str, torch.dtype]]) -> None:
        """Note the entries of the optimizer's state, and allocate memory for them (collective)."""
        for number, name, dtype in entries:
            flat = self._places[number][0]
            entry = (name, flat, dtype)
            self._entries.setdefault(number, {})[name] = entry
            if entry not in self._vectors:
                length = len(self._parameters) if name in COUNTERS else len(self._flats[flat].weights)
                self._vectors[entry] = self._node.shared(length, dtype=dtype)
