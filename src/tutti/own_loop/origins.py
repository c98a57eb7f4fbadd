"""The batches that a loss is of, and whether it is a sum over their samples, read from its graph.

    loss ─ Neg ─ NllLoss ─ LogSoftmax ─ Addmm          the model's output: called with a batch of 7 samples
           └ scalars ┘                  └ noted here

The forward hook of a model notes in the node of each output which batch the model was called with. Before a
backward pass the graph is read from the loss down to these nodes. Where none is noted, as the model is
compiled or called through another method, it is read down to the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Final, cast

from torch import Tensor, nn

from tutti.own_loop.structure import tensors_in

KEY: Final = "tutti"
"""The entry of a node's metadata that is ours."""

MEAN: Final = 1
SUM: Final = 2
"""The numbers of reduction="mean" and "sum" in torch's loss functions."""

LINEAR: Final = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("Add", "Sub", "Rsub", "Neg", "ToCopy", "Squeeze", "Unsqueeze", "View", "Clone", "Alias"),
        *("Stack", "Sum", "Mean"),
    )
    for number in (0, 1)
)
"""Nodes through which a mean over samples stays one."""

MIXING: Final = ("Mm", "Bmm", "Stack", "Cat")
"""The first letters of nodes behind which the first dimension may be another than that of the samples."""


class Verdict(Enum):
    """What a loss is over the samples of its batch."""

    MEAN = auto()
    SUM = auto()
    UNKNOWN = auto()


@dataclass(frozen=True, eq=False)
class SampleCounts:
    """The samples of a batch: this rank's own, and those of all ranks.

    Attributes:
        check: a checksum of the indices of all samples of the iteration up to it; 0: they have no indices.
    """

    own: int
    all: int
    check: int = 0


@dataclass(eq=False)
class WatchedModel:
    """A model whose losses are judged.

    Attributes:
        module: the model.
        reduction: of its losses, "mean" or "sum"; None: not declared.
        is_warned: whether the warning of an unknown loss has been given.
    """

    module: nn.Module
    reduction: str | None
    is_warned: bool = False


@dataclass(frozen=True)
class Origin:
    """What an output of a model comes from.

    Attributes:
        batches: that the model was called with.
        model: the model.
    """

    batches: tuple[SampleCounts, ...]
    model: WatchedModel


def note_origin(outputs: object, origin: Origin) -> None:
    """Note where a model's outputs come from."""
    for tensor in tensors_in(outputs):
        if tensor.grad_fn is not None:
            cast("Any", tensor.grad_fn).metadata[KEY] = origin


def ends_of(nodes: Iterable[Any], is_barred: Callable[[Any], bool] = lambda _: False) -> Iterator[Any]:
    """Yield the nodes where a graph ends: noted outputs of models, and parameters.

    Args:
        nodes: the last ones of the graph.
        is_barred: whether a node is not passed.
    """
    seen, left = set[Any](), list(nodes)
    while left:
        node = left.pop()
        if node in seen:
            continue
        seen.add(node)
        below = _below(node)
        if KEY in node.metadata or not below:
            yield node
        elif not is_barred(node):
            left += below


def judge(root: Any, own: int) -> Verdict:
    """Return what a loss is over a rank's samples.

    The graph is followed from the loss through linear nodes. The loss is a sum if a path ends in a sum over
    the samples and passes no division. It is a mean if every path ends in a mean over the samples, or in
    something that is not of the batch, such as a penalty on weights.

    Args:
        root: the loss's node.
        own: how many samples the rank has.
    """

    def may_divide(node: Any) -> bool:
        is_product = node.name().startswith("Mul") and len(_below(node)) == 1
        return node.name().startswith("Div") or (is_product and _factor(node) * own <= 1)

    def may_mix_samples(node: Any) -> bool:
        return node.name().startswith(MIXING) or 0 in _reduced(node) or may_divide(node)

    verdict = Verdict.MEAN
    is_noted = any(KEY in node.metadata for node in ends_of([root]))
    left, seen = [(root, False, is_noted)], set[tuple[Any, bool, bool]]()
    while left:
        path = left.pop()
        if path in seen:
            continue
        seen.add(path)
        node, is_divided, is_noted = path
        is_noted &= KEY not in node.metadata  # inside of the model no outputs are noted
        name, below, reduced = node.name(), _below(node), _reduced(node)
        reduction = getattr(node, "_saved_reduction", None)
        is_over_samples = own in reduced.values() or (0 in reduced and reduced[0] % own == 0)
        is_mean = name.startswith("Mean") or reduction == MEAN
        is_sum = reduction == SUM or (
            name.startswith("Sum") and len(reduced) == len(node._saved_self_sym_sizes)
        )
        if is_over_samples and is_mean and _is_of_batch(node, is_noted, _adds_samples):
            continue
        is_sum &= is_over_samples and not is_divided
        if is_sum and _is_of_batch(node, is_noted, may_mix_samples):
            return Verdict.SUM
        # Only torch's cross_entropy makes these, for probabilities of classes and for label smoothing.
        if name == "DivBackward1" or (name == "MulBackward1" and below[0].name() == "DivBackward0"):
            continue
        if name in LINEAR or (name.startswith(("Mul", "Div")) and len(below) == 1 and _factor(node)):
            left += [(one, is_divided or may_divide(node), is_noted) for one in below]
        elif _is_of_batch(node, is_noted):
            verdict = Verdict.UNKNOWN
    return verdict


def _below(node: Any) -> list[Any]:
    return [one for one, _ in node.next_functions if one is not None]


def _is_of_batch(node: Any, is_noted: bool, is_barred: Callable[[Any], bool] = lambda _: False) -> bool:
    """Return whether a node depends on the batch of a model whose reduction is not declared."""
    ends = list(ends_of(_below(node), is_barred))
    if not is_noted:
        return len(ends) > 1  # with one end it is a penalty on a weight
    return any(KEY in end.metadata and end.metadata[KEY].model.reduction is None for end in ends)


def _factor(node: Any) -> float:
    """Return the size of the number that a tensor is multiplied with or divided by; 0: there is none."""
    is_first = len(node.next_functions) == 1 or node.next_functions[0][0] is not None
    if not is_first and node.name().startswith("Div"):
        return 0.0
    constant = node._saved_other if is_first else node._saved_self
    if isinstance(constant, Tensor):
        return abs(float(constant.item())) if constant.numel() == 1 else 0.0
    return 0.0 if constant is None else abs(float(constant))


def _reduced(node: Any) -> dict[int, int]:
    """Return the dimensions that a node reduces, by a sum, a mean, a norm or the like, with their sizes."""
    if getattr(node, "_saved_reduction", None) in (MEAN, SUM):
        return dict(enumerate(node._saved_self.shape))
    if not hasattr(node, "_saved_keepdim") and node.name() not in ("SumBackward0", "MeanBackward0"):
        return {}
    sizes = getattr(node, "_saved_self_sym_sizes", (0, 0))  # of a norm they are not known
    dims = getattr(node, "_saved_dim", None)
    dims = (dims,) if isinstance(dims, int) else dims or range(len(sizes))
    # Torch keeps -1 as 2^64 - 1.
    signed = [(dim - 2**64 if dim >= 2**63 else dim) % max(len(sizes), 1) for dim in dims]
    return {dim: sizes[dim] for dim in signed} if sizes else {}


def _adds_samples(node: Any) -> bool:
    return node.name().startswith("SumBackward") and 0 in _reduced(node)
