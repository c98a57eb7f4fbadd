"""The user's optimizer, run on stretches of the flat vectors: each rank moves its own and keeps its state.

After Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 5.1 (stage 1: the optimizer's state is partitioned).

    weights  ├─ 0.weight ──┼ 0.bias ┼──────── 1.weight ────────┼ 1.bias ┤
    group    │      0      │   1    │            0             │   1    │
    shard    ├─────────────── rank 0 ─────────┼────────── rank 1 ────────┤
    slices   ├─────────────┼────────┼─────────┼─────────────────┼────────┤   elementwise optimizers
    shard    ├─────── rank 0 ───────┼────────────── rank 1 ─────────────┤
    slices   ├─────────────┼────────┼──────────────────────────┼────────┤   others of torch: whole parameters
    shard    ├──────────────────────────── rank 0 ────────────────────────┤   all others: the whole model

An elementwise optimizer computes each new weight only from that weight's gradient and state, and its
parameters may be cut anywhere. The other optimizers of torch may use a parameter's shape, but treat each
parameter independently. Any other optimizer may combine all parameters, as in a norm: one rank of a host
steps the user's own object. Parameters without a gradient in an update are left as they are, with their
state.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import Tensor, nn, optim
from torch.optim import Optimizer

from tutti.errors import BadModel, BadOption
from tutti.optim.parameterwise import ParameterWise, is_parameterwise
from tutti.optim.sliced_optimizer import COUNTERS, GroupOptimizer, ParameterSlice, is_elementwise, is_fused
from tutti.optim.state import held_by
from tutti.replica import ALIGNMENT, NONE_MISSING, Flat, Missing, Replica
from tutti.state import LocalState

UNUSABLE: dict[type[Optimizer], str] = {
    optim.LBFGS: "calls the model several times for one update",
    optim.SparseAdam: "takes only sparse gradients, and the gradients here are dense vectors",
}
"""Optimizers that cannot move a slice of a vector, and why."""

PIECE = 1 << 17
"""Elements that a fused optimizer of the CPU moves at a time: their gradients are still in the cache then."""


def check_usable(optimizer: type[Optimizer]) -> None:
    """Raise BadOption for an optimizer that cannot move weights slice by slice."""
    for cls, why in UNUSABLE.items():
        if issubclass(optimizer, cls):
            raise BadOption(
                f"optimizer {optimizer.__name__} cannot be used: it {why}; use another, such as adam or sgd"
            )


def own_slices(flat: Flat, parts: int, optimizer: Optimizer, whole: bool = False) -> list[slice]:
    """Cut a vector into `parts` consecutive slices of about equal length that `optimizer` can work on.

    Some are empty if there is little to cut. With `whole` no parameter is cut.
    """
    if not is_parameterwise(optimizer):
        everything = len(flat.weights)
        return [slice(0, everything), *[slice(everything, everything)] * (parts - 1)]
    if whole or not is_elementwise(optimizer):
        return _whole_slices(flat, parts, optimizer)
    return equal_slices(flat, parts)


def equal_slices(flat: Flat, parts: int) -> list[slice]:
    """Cut a vector into `parts` consecutive slices of about equal length."""
    lines = len(flat.weights) // ALIGNMENT  # no two ranks write to one cache line
    edges = [lines * part // parts * ALIGNMENT for part in range(parts + 1)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def _whole_slices(flat: Flat, parts: int, optimizer: Optimizer) -> list[slice]:
    """Cut a vector between parameters into `parts` consecutive slices that take about the same time."""
    sums = [0]
    for parameter in flat.parameters:
        sums.append(sums[-1] + _cost(optimizer, parameter))
    starts = [span.start for span in flat.spans] + [len(flat.weights)]
    nearest = [
        min(range(len(sums)), key=lambda number: abs(sums[number] - sums[-1] * part / parts))
        for part in range(1, parts)
    ]
    edges = [0, *(starts[number] for number in nearest), len(flat.weights)]
    return [slice(start, stop) for start, stop in pairwise(edges)]


def _cost(optimizer: Optimizer, parameter: nn.Parameter) -> int:
    if isinstance(optimizer, ParameterWise):
        for group in optimizer.param_groups:
            if any(parameter is one for one in group["params"]):
                return optimizer.cost(parameter, group)
    return parameter.numel()


class ShardedOptimizer:
    """The user's optimizer, run on given slices of a replica's vectors.

    The user's optimizer is not stepped: its class, options and param groups are used, and groups are read at
    every step, so that a learning-rate scheduler attached to it takes effect. Its existing state is carried
    over. An optimizer that may combine parameters is stepped if this rank's slices cover the whole model.

    BadOption: the optimizer cannot be used like this. BadModel: it moves a parameter of no model.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        replica: Replica,
        slices: Sequence[slice] | None = None,  # of each vector, from `own_slices`; None: all of it
        grads: Sequence[Tensor] | None = None,  # instead of `flat.grads`, for each vector
    ) -> None:
        check_usable(type(optimizer))
        if slices is None:
            slices = [slice(0, len(flat.weights)) for flat in replica.flats]
        whole = bool(replica.flats) and all(
            own == slice(0, len(flat.weights)) for own, flat in zip(slices, replica.flats, strict=True)
        )
        vectors = [flat.grads for flat in replica.flats] if grads is None else grads
        own_grads = all(
            vector.data_ptr() == flat.grads.data_ptr()
            for vector, flat in zip(vectors, replica.flats, strict=True)
        )
        self._optimizer, self._replica = optimizer, replica
        self.joint = whole and own_grads and not is_parameterwise(optimizer)
        check_parameters(optimizer, replica)
        self.pieces = tuple(
            FlatPiece(optimizer, flat, vector, place, joint=self.joint)
            for flat, vector, own in zip(replica.flats, vectors, slices, strict=True)
            for place in _places(optimizer, flat, own)
        )

    def step(self, missing: Missing | None = None) -> None:
        """Move the weights of all slices but `missing` parameters, by default those without a gradient."""
        self.begin()
        missing = self._replica.gradients.missing() if missing is None else missing
        if self.joint:
            self.step_itself(missing)
            return
        for piece in self.pieces:
            piece.step(missing)

    def step_itself(self, missing: Missing) -> None:
        """Step the user's own optimizer, except for `missing` parameters."""
        own = [(p, p.grad) for flat in self._replica.flats for p in flat.parameters]
        for parameter, view in own:
            # An alias: the optimizer's writes into a gradient do not count as autograd's.
            parameter.grad = None if parameter in missing or view is None else view.data
        try:
            self._optimizer.step()
        finally:
            for parameter, view in own:
                parameter.grad = view

    def state(self) -> LocalState:
        """Return the optimizer's state for the slices, by parameter."""
        names = self._replica.names
        held = held_by(self._optimizer, names) if self.joint else LocalState()
        for piece in self.pieces:
            for run in piece.runs:
                run.add_state(held, names)
        return held

    def counters(self) -> LocalState:
        """Return the optimizer's counters for the parameters of the slices."""
        return LocalState([one for one in self.state().pieces if one.name.rpartition("/")[2] in COUNTERS])

    def begin(self) -> None:
        """Announce an update; after it the pieces may be stepped one by one."""
        announce(self._optimizer)


class FlatPiece:
    """A part of one flat vector; small enough for a core's cache where the optimizer's calls are cheap."""

    def __init__(
        self,
        optimizer: Optimizer,
        flat: Flat,
        grads: Tensor,
        place: slice,
        joint: bool = False,
    ) -> None:
        self.flat, self.place = flat, place
        by_group = {} if joint else _slices(optimizer, flat, place)
        # One for each param group; none where the pieces are moved jointly.
        self.runs = tuple(
            GroupOptimizer(optimizer, group, flat, grads, slices) for group, slices in by_group.items()
        )

    def step(self, missing: Missing = NONE_MISSING) -> None:
        """Move this piece's weights, except those of `missing` parameters."""
        for run in self.runs:
            run.step(missing)


def announce(optimizer: Optimizer) -> None:
    """Set the mark of `optimizer.step()`: schedulers warn without it."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def _places(optimizer: Optimizer, flat: Flat, own: slice) -> list[slice]:
    """Cut a slice into pieces; into one if a call of the optimizer is expensive."""
    fused = any(is_fused(optimizer, group, flat.parameters) for group in optimizer.param_groups)
    cheap = fused and is_elementwise(optimizer) and flat.weights.is_cpu
    length = PIECE if cheap else max(1, own.stop - own.start)
    return [slice(at, min(at + length, own.stop)) for at in range(own.start, own.stop, length)]


def groups_of(optimizer: Optimizer) -> dict[nn.Parameter, int]:
    """Return the param group of each parameter that is trained, or has been."""
    return {
        parameter: number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
        if parameter.requires_grad or parameter.grad is not None or optimizer.state.get(parameter)
    }


def _slices(optimizer: Optimizer, flat: Flat, place: slice) -> dict[int, list[ParameterSlice]]:
    """Return the slices of parameters to move in `place`, by param group."""
    group_of = groups_of(optimizer)
    elementwise = is_elementwise(optimizer)
    slices: dict[int, list[ParameterSlice]] = {}
    ends = [*(span.start for span in flat.spans[1:]), len(flat.weights)]
    for parameter, span, end in zip(flat.parameters, flat.spans, ends, strict=True):
        start, stop = max(span.start, place.start), min(span.stop, place.stop)
        group = group_of.get(parameter)
        if group is not None and start < stop:
            elements = slice(start - span.start, stop - span.start)
            # With the gap: fused kernels may round differently after the last full register, and an update
            # must be bit-equal wherever the vector is cut.
            stop = min(end, place.stop) if elementwise else stop
            slices.setdefault(group, []).append(ParameterSlice(parameter, elements, slice(start, stop)))
    return slices


def check_parameters(optimizer: Optimizer, replica: Replica) -> None:
    """Raise BadModel for parameters that are not part of the model: they would not move."""
    known = {id(parameter) for parameter in replica.module.parameters()}
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            if parameter.requires_grad and id(parameter) not in known:
                raise BadModel(
                    f"param group {number} of the optimizer has a parameter of shape "
                    f"{tuple(parameter.shape)} that is no trainable parameter of the model; make the "
                    "optimizer from model.parameters()"
                )
