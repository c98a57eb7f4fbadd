"""Layers that keep channels apart, which need no other rank to be applied to a share."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call

from tutti.model_parallel.shares import Cut, TensorShare, for_shares

POINTWISE: Final = (
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardshrink,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.LogSigmoid,
    nn.Mish,
    nn.ReLU,
    nn.ReLU6,
    nn.SELU,
    nn.SiLU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Softshrink,
    nn.Softsign,
    nn.Tanh,
    nn.Tanhshrink,
    nn.Threshold,
)
"""Layers that map each number by itself, without random numbers."""

POOLING: Final = (nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.AvgPool2d, nn.MaxPool2d)
"""Layers that map each image of each channel by itself."""

WEIGHTED: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.PReLU)
"""Layers with numbers of their own for each channel (dimension 1)."""

DROPOUT: Final = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
"""Layers that multiply by random numbers."""


def through(layer: nn.Module, share: TensorShare) -> TensorShare | None:
    """Apply `layer` to a share; None if it needs the whole.

    A layer with hooks needs it: they expect what they see without tensor parallelism.
    """
    if hooked(layer):
        return None
    way = _WAYS.get(type(layer))
    return None if way is None else way(layer, share)


def hooked(layer: nn.Module) -> bool:
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


def _dropout(layer: nn.Module, share: TensorShare) -> TensorShare:
    """Draw for all channels, as one rank would, and take this rank's."""
    if not layer.training:
        return share
    shape = list(share.own.shape)
    shape[share.cut.dim] = share.cut.length
    # Random numbers are drawn in the order in which the elements lie in memory.
    channels_last = share.own.dim() == 4 and share.own.stride(1) == 1
    order = torch.channels_last if channels_last else torch.contiguous_format
    kept = layer(share.own.new_ones(shape).contiguous(memory_format=order))
    return TensorShare(share.own * share.cut.own(kept).clone(), share.cut)


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


_WAYS: Final[dict[type[nn.Module], Callable[[Any, TensorShare], TensorShare | None]]] = {
    **dict.fromkeys(POINTWISE, _pointwise),
    **dict.fromkeys(POOLING, _pooling),
    **dict.fromkeys(WEIGHTED, _weighted),
    **dict.fromkeys(DROPOUT, _dropout),
    nn.Flatten: _flatten,
}
