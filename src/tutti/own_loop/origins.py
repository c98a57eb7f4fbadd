"""The batches that a loss is of, and whether it is a sum over their samples, read from its graph.

    loss ─ Neg ─ NllLoss ─ LogSoftmax ─ Addmm          the model's output: called with a batch of 7 samples
           └ scalars ┘                  └ noted here

The forward hook of a model notes in the node of each output which batch the model was called with. Before a
backward pass the graph is read from the loss down to these nodes; the model's own nodes are not visited.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isclose, prod
from typing import Any, Final, cast

from tutti.own_loop.structure import tensors_in

KEY: Final = "tutti"
"""The entry of a node's metadata that is ours."""

SUM: Final = 2
"""The number of reduction="sum" in torch's loss functions."""

LINEAR: Final = frozenset(
    f"{name}Backward{number}"
    for name in ("Add", "Sub", "Rsub", "Neg", "ToCopy", "Squeeze", "View", "Clone", "Alias")
    for number in (0, 1)
)
"""Nodes through which a sum stays one."""

MIXING: Final = ("Mean", "Var", "Std", "Mm", "Bmm", "Stack")
"""The first letters of nodes behind which the first dimension may be another than that of the samples."""


@dataclass(frozen=True, eq=False)
class SampleCounts:
    """The samples of a batch: this rank's own, and those of all ranks.

    Attributes:
        check: a checksum of the indices of all samples of the iteration up to it; 0: they have no indices.
    """

    own: int
    all: int
    check: int = 0


@dataclass(frozen=True)
class Origin:
    """What an output of a model comes from.

    Attributes:
        batches: that the model was called with.
        reduction: of the model's losses, "mean" or "sum"; None: nobody has said.
    """

    batches: tuple[SampleCounts, ...]
    reduction: str | None


def note_origin(outputs: object, origin: Origin) -> None:
    """Note where a model's outputs come from."""
    for tensor in tensors_in(outputs):
        if tensor.grad_fn is not None:
            cast("Any", tensor.grad_fn).metadata[KEY] = origin


def origins_of(nodes: Iterable[Any], barred: tuple[str, ...] = ()) -> list[Origin]:
    """Return the origins of a graph's outputs.

    Args:
        nodes: the last ones of the graph.
        barred: the first letters of nodes that are not passed.
    """
    found, seen, left = list[Origin](), set[Any](), list(nodes)
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        origin = node.metadata.get(KEY)
        if origin is not None:
            found.append(origin)
        elif not (barred and node.name().startswith(barred)):
            left += [below for below, _ in node.next_functions if below is not None]
    return found


def sums_samples(root: Any, own: int, whole: int) -> tuple[tuple[str, ...], bool]:
    """Find out whether a loss is a sum over a rank's samples, and not divided by their number.

    Sums of other things, such as weights, are none, and neither are those over outputs whose reduction the
    program has given. A division makes a mean of a sum, as what it is by may be the weights of the samples or
    the number of their tokens; but not one by the number of all ranks' samples.

    Args:
        root: the loss's node.
        own: how many samples the rank has.
        whole: how many all ranks have.

    Returns:
        The names of the nodes down to those that reduce, and whether one of these sums the samples up.
    """
    names, summed, left = list[str](), False, [(root, 1.0)]
    while left:
        node, divisor = left.pop()
        name = node.name()
        names.append(name)
        below = [one for one, _ in node.next_functions if one is not None]
        if name in LINEAR:
            left += [(one, divisor) for one in below]
        elif name in ("MulBackward0", "DivBackward0"):
            by = _number_in(node) if len(below) == 1 else 0.0
            if by and name == "MulBackward0":
                left.append((below[0], divisor / by))
            elif by == whole:
                left.append((below[0], divisor * by))
        elif (terms := _terms(node, own)) is not None:
            times = round(abs(divisor) / own)
            is_mean = times >= 1 and isclose(abs(divisor), times * own)
            summed |= divisor == 1 or not is_mean or (divisor == whole != terms)
    return tuple(names), summed


def _number_in(node: Any) -> float:
    """Return the constant that a product or quotient has; 0: it has none."""
    constant = node._saved_self if node.next_functions[0][0] is None else node._saved_other
    return float(constant.item()) if constant is not None and constant.numel() == 1 else 0.0


def _terms(node: Any, own: int) -> int | None:
    """Return of how many terms a node is the sum, if it is one over the samples."""
    if getattr(node, "_saved_reduction", None) == SUM:
        terms, barred = node._saved_self.numel(), tuple[str, ...]()
    else:
        shape = tuple(getattr(node, "_saved_self_sym_sizes", ()))
        dims = getattr(node, "_saved_dim", shape)
        if not node.name().startswith("SumBackward") or shape[:1] != (own,) or len(dims) != len(shape):
            return None
        terms, barred = prod(shape), MIXING
    return terms if any(one.reduction is None for one in origins_of([node], barred)) else None
