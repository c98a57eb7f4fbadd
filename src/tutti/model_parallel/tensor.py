"""Tensor parallelism: every layer's weights are cut over the ranks, and its outputs stay cut while they can.

All ranks of a team work on the same samples. Of a layer with F outputs (features, or maps) rank r computes
its share. What works channel by channel goes on with that; the next layer needs all of them:

    forward     y_r = W_r x + b_r                x: all_gather
    backward    dW_r = dy_r x^T                  x: all_gather, once more
                dx = sum over r of W_r^T dy_r    own channels of dx: reduce_scatter

    rank 0   W_0 x ─► ReLU ─► pooling ─┐        ┌─► y ─► V_0 y ─► ...
    rank 1   W_1 x ─► ReLU ─► pooling ─┴ gather ┴─► y ─► V_1 y ─► ...

A layer's parameters, gradients and optimizer state exist once in a team, and so do the activations of an
`nn.Sequential`: y is dropped after V_r y, and gathered once more in the backward pass. In a module with a
forward of its own it is not known who reads the outputs of a layer: they are put together at once.

Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks", section 3 (model
parallelism in dense layers); Shoeybi et al. 2019, "Megatron-LM", section 3 (the pair of conjugate operators).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any, Final, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import modules
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.errors import BadModel
from tutti.model_parallel.base import LayoutRanks, Of, TeamPortion, Workload, taken, values_of
from tutti.model_parallel.layout import Layout
from tutti.model_parallel.memory import MemoryNeed, held, of_teams, on_meta, peak_of_step
from tutti.model_parallel.shares import Cut, TensorShare, for_shares, kept_as_share, whole

SPLIT: Final[dict[type[nn.Module], int]] = {nn.Linear: -1, nn.Conv2d: -3}
"""The layers that can be cut, and which dimension of their outputs the cut runs through."""

REPLICATED: Final = (
    modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.GroupNorm,
    nn.PReLU,
)
"""Layers with few weights, which every rank has whole."""


class TensorPortion(TeamPortion):
    """The shares that one rank has of a model's layers.

    Raises:
        BadModel: a layer cannot be cut, or has fewer outputs than there are ranks.
    """

    def __init__(self, module: nn.Module, ranks: LayoutRanks) -> None:
        super().__init__(module, ranks, lambda p: p in self._split or ranks.team.rank == 0)
        self._split = split(module, ranks.team)

    @override
    def state(self, of: Of = values_of) -> dict[str, Any]:
        found = {tensor: cut.gather(of(tensor)) for tensor, cut in self._split.items()}
        # Shares that stand under two names are one tensor under two names again.
        return taken(self.module, lambda tensor: found[tensor] if tensor in found else of(tensor))


def split(module: nn.Module, team: Communicator) -> dict[Tensor, Cut]:
    """Cut every Linear and Conv2d layer of `module` over the team, in place.

    It takes whole inputs and gives whole outputs afterwards, and so does each of its layers when called.

    Returns:
        The parameters that are shares now, and how they were cut.

    Raises:
        BadModel: a layer cannot be cut, or has fewer outputs than there are ranks.
    """
    layers = {name: part for name, part in module.named_modules() if part._parameters}
    for name, layer in layers.items():
        _refuse_uncut(name or type(module).__name__, layer, team.size)
    shares: dict[Tensor, nn.Parameter] = {}
    found: dict[Tensor, Cut] = {}
    for layer in layers.values():
        if type(layer) not in SPLIT:
            continue
        outputs = Cut.of(len(layer.get_parameter("weight")), team, 0)
        for name, parameter in list(layer.named_parameters(recurse=False)):
            if parameter not in shares:
                own = outputs.own(parameter.detach()).clone(memory_format=torch.preserve_format)
                shares[parameter] = nn.Parameter(own, parameter.requires_grad)
                found[shares[parameter]] = outputs
            setattr(layer, name, shares[parameter])
        layer.forward = CutLayer(layer, outputs)
    for part in module.modules():
        if type(part).forward is nn.Sequential.forward:
            part.forward = CutSequential(cast("nn.Sequential", part))
    return found


class ShareForward(ABC):
    """The forward pass of a module that can take a share and give one; called, it gives the whole."""

    def __call__(self, inputs: Tensor) -> Tensor:
        """The outputs of the module (collective)."""
        return whole(self.carry(inputs))

    @abstractmethod
    def carry(self, value: Tensor | TensorShare) -> Tensor | TensorShare:
        """The outputs of the module, cut where they can be (collective)."""


class CutLayer(ShareForward):
    """The forward pass of a layer of whose outputs each rank computes its share."""

    def __init__(self, layer: nn.Module, outputs: Cut) -> None:
        self._compute, self._outputs, self._dim = layer.forward, outputs, SPLIT[type(layer)]
        for attribute in ("out_features", "out_channels"):
            if hasattr(layer, attribute):
                setattr(layer, attribute, outputs.widths[outputs.team.rank])

    @override
    def carry(self, value: Tensor | TensorShare) -> TensorShare:
        inputs = for_shares(value, self._outputs.team)
        with kept_as_share(value, inputs) if isinstance(value, TensorShare) else nullcontext():
            own = self._compute(inputs)
        return TensorShare(own, replace(self._outputs, dim=own.dim() + self._dim))


class CutSequential(ShareForward):
    """The forward pass of an `nn.Sequential`: it is known who reads what."""

    def __init__(self, layers: nn.Sequential) -> None:
        self._layers = layers

    @override
    def carry(self, value: Tensor | TensorShare) -> Tensor | TensorShare:
        for layer in self._layers:
            value = _next(layer, value)
        return value


def _next(layer: nn.Module, value: Tensor | TensorShare) -> Tensor | TensorShare:
    # A layer with hooks needs the whole: they expect what they see without tensor parallelism.
    if not _is_hooked(layer):
        if isinstance(layer.forward, ShareForward):
            return layer.forward.carry(value)
        way = _APPLIED_TO_SHARES.get(type(layer))
        found = way(layer, value) if way is not None and isinstance(value, TensorShare) else None
        if found is not None:
            return found
    return cast("Tensor", layer(whole(value)))


def _refuse_uncut(name: str, layer: nn.Module, ranks: int) -> None:
    groups = getattr(layer, "groups", 1)
    if type(layer) not in SPLIT or groups != 1:
        if isinstance(layer, REPLICATED):
            return
        kind = f"{type(layer).__name__}{f' of {groups} groups' if groups != 1 else ''}"
        raise BadModel(
            f"layer '{name}' of the model is a {kind}, which cannot be cut by its outputs; use "
            "--parallel sharded"
        )
    outputs = len(layer.get_parameter("weight"))
    if outputs < ranks:
        raise BadModel(
            f"layer '{name}' of the model has {outputs} outputs, which cannot be cut over {ranks} "
            f"ranks; use tensor={outputs} or fewer"
        )


MIXING: Final = (
    "GLU",
    "LogSoftmax",
    "MultiheadAttention",
    "PReLU",
    "RReLU",
    "Softmax",
    "Softmax2d",
    "Softmin",
)
"""The activations of torch that look at several numbers, have weights or draw random numbers."""

POOLING: Final = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.AvgPool2d, nn.MaxPool2d)
"""Layers that map each image of each channel by itself."""

WEIGHTED: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.PReLU)
"""Layers with numbers of their own for each channel (dimension 1)."""


def _is_hooked(layer: nn.Module) -> bool:
    """Return whether hooks see the inputs or outputs of a layer, or their gradients."""
    hooks = layer._forward_pre_hooks, layer._forward_hooks, layer._backward_pre_hooks, layer._backward_hooks
    return any(hooks)


def _pointwise(layer: nn.Module, share: TensorShare) -> TensorShare:
    return TensorShare(layer(share.own), share.cut)


def _pooling(layer: Any, share: TensorShare) -> TensorShare | None:
    images = share.cut.dim == share.own.dim() - 3
    return _pointwise(layer, share) if images and not getattr(layer, "return_indices", False) else None


def _flatten(layer: Any, share: TensorShare) -> TensorShare | None:
    last = share.own.dim() - 1
    if share.cut.dim != 1 or layer.start_dim != 1 or layer.end_dim not in (-1, last):
        return None
    each = prod(share.own.shape[2:])
    return TensorShare(
        layer(share.own), Cut(share.cut.team, tuple(each * width for width in share.cut.widths), 1)
    )


def _weighted(layer: nn.Module, share: TensorShare) -> TensorShare | None:
    """Apply a layer that every rank has whole, with the numbers of this rank's channels.

    They stay equal on all ranks: gradients add up, and statistics are put together.
    """
    if share.cut.dim != 1:
        return None
    numbers = Cut(share.cut.team, share.cut.widths, 0)

    def mine(tensor: Tensor) -> Tensor:
        return numbers.own(tensor) if tensor.dim() and len(tensor) == numbers.length else tensor

    used = {name: mine(for_shares(p, numbers.team)) for name, p in layer.named_parameters()}
    # Copies, for autograd keeps them: the layer's own change below.
    statistics = {name: mine(b).clone() for name, b in layer.named_buffers() if b.dim()}
    outputs = functional_call(layer, used | statistics, share.own)
    if layer.training:
        for name, found in statistics.items():
            layer.get_buffer(name).copy_(numbers.gather(found))
    return TensorShare(outputs, share.cut)


_ACTIVATIONS: Final = [
    getattr(modules.activation, name) for name in modules.activation.__all__ if name not in MIXING
]

_APPLIED_TO_SHARES: Final[dict[type[nn.Module], Callable[[Any, TensorShare], TensorShare | None]]] = {
    **dict.fromkeys((nn.Identity, *_ACTIVATIONS), _pointwise),
    **dict.fromkeys(POOLING, _pooling),
    **dict.fromkeys(WEIGHTED, _weighted),
    nn.Flatten: _flatten,
}
"""Applies a layer to a share; returns None if that needs the whole."""


def portion(layout: Layout, comm: Communicator, module: nn.Module, workload: Workload) -> TensorPortion:
    """Make this rank's shares of a model (collective)."""
    return TensorPortion(module, LayoutRanks.of(comm, layout.team))


def need(layout: Layout, module: nn.Module, workload: Workload, state: float) -> MemoryNeed:
    """Return the need of a rank."""
    model = on_meta(module)
    # Rank 0 of a team that does not exist: on the meta device nothing is exchanged.
    split(model, cast("Communicator", SimpleNamespace(rank=0, size=layout.team)))
    peak = peak_of_step(model, workload, -(-workload.batch_size // layout.data))
    return of_teams(layout.data, *held(model), state, peak)
