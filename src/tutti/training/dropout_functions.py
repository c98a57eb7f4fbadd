"""torch's functions that drop numbers, drawn by sample: `dropout`, and the dropout inside of attention.

Models call them by their names in `torch.nn.functional`, and so do torch's own attention layers, Hugging
Face's models and Keras's layers. Meanwhile these names stand for the functions below. Threads and virtual
ranks that do not train, and calls with nothing to be drawn by sample, get torch's own.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

Draw = Callable[[str, Sequence[int], float], Tensor | None]
"""Tells which numbers of a function's input are kept, by its name, the input's shape and a probability."""

_NAMES: Final = ("dropout", "scaled_dot_product_attention")
_TORCHS: Final[dict[str, Any]] = {name: getattr(functional, name) for name in _NAMES}

_DRAW: Final[ContextVar[Draw | None]] = ContextVar("draw", default=None)
"""Of this thread, or of this virtual rank."""

_LOCK: Final = threading.Lock()
_users = 0


@contextmanager
def functions_drawn(draw: Draw) -> Iterator[None]:
    """Have the functions that this thread, or virtual rank, calls draw by `draw` meanwhile."""
    global _users
    with _LOCK:
        _users += 1
        if _users == 1:
            functional.dropout = dropout
            functional.scaled_dot_product_attention = scaled_dot_product_attention
    token = _DRAW.set(draw)
    try:
        yield
    finally:
        _DRAW.reset(token)
        with _LOCK:
            _users -= 1
            if not _users:
                for name, function in _TORCHS.items():
                    setattr(functional, name, function)


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """`torch.nn.functional.dropout`, by sample."""
    kept = _draw("dropout", input, input.shape, p) if training else None
    if kept is None:
        found: Tensor = _TORCHS["dropout"](input, p, training, inplace)
        return found
    noise = torch.empty_like(input).copy_(kept).mul_(1 / (1 - p))
    return input.mul_(noise) if inplace else input * noise


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`; its dropout, if any, by sample.

    On a CPU torch, too, computes attention with dropout step by step.
    """
    shape = (*query.shape[:-1], key.shape[-2])
    kept = _draw("scaled_dot_product_attention", query, shape, dropout_p)
    if kept is None:
        found: Tensor = _TORCHS["scaled_dot_product_attention"](
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return found
    if enable_gqa:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    products = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        seen = attn_mask if attn_mask.dtype == torch.bool else attn_mask != -math.inf
        products = products + (0 if attn_mask.dtype == torch.bool else attn_mask)
        # What sees nothing has no weights: torch gives zeros there, too.
        blind = ~seen.any(dim=-1, keepdim=True)
        weights = products.masked_fill(~seen, -math.inf).masked_fill(blind, 0).softmax(dim=-1)
        weights = weights.masked_fill(blind, 0)
    else:
        weights = products.softmax(dim=-1)
    return (weights * kept * (1 / (1 - dropout_p))) @ value


def can_be_drawn(input: Tensor) -> bool:
    """Tell whether a function's numbers may be drawn by sample: not where torch transforms its code."""
    return (
        type(input) is Tensor
        and input.is_cpu
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def _draw(name: str, input: Tensor, shape: Sequence[int], p: float) -> Tensor | None:
    """Return which numbers are kept; None where torch's own function is to draw, or nothing is drawn."""
    if not can_be_drawn(input):
        return None
    draw = _DRAW.get()
    return draw(name, shape, p) if draw is not None and shape and 0 < p < 1 else None
