"""The layout in which samples lie next to each other in memory, and the torch functions with kernels for it.

Images stay tensors of shape (n, maps, height, width) with other strides. All functions of torch work on them:
elementwise ones keep the strides, and a flattening in front of a dense layer is a view.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import index
from typing import Any, Final, SupportsIndex, cast

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from typing_extensions import override

from tutti.batch_last.functions import REALS, Convolution, MaximumPooling, Pair, library

PLACES: Final = 256
"""The largest window that is pooled, in numbers: a place in one is kept as a byte."""


class BatchLast(TorchFunctionMode):
    """Computes two-dimensional convolutions and maximum pooling by the kernels, inside a `with` block.

    They compute in one thread, in float32 and float64, forward and backward; results equal torch's except for
    rounding. Torch does the rest: other dtypes, dilation, fewer samples than a vector of the processor has,
    autocast, `torch.func`, forward-mode differentiation, and recomputation in `torch.utils.checkpoint`.
    Gradients cannot be differentiated again: torch raises.
    """

    @override
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        ours = _OURS.get(func)
        found = None if ours is None else ours(*args, **kwargs)
        return func(*args, **kwargs) if found is None else found


def _conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Pair = 1,
    padding: str | int | Pair = 0,
    dilation: int | Pair = 1,
    groups: int = 1,
) -> Tensor | None:
    """Convolve; None: the kernels cannot."""
    tensors = (input, weight) if bias is None else (input, weight, bias)
    if isinstance(padding, str) or _pair(dilation) != (1, 1) or not _computed(*tensors):
        return None
    outputs, strides, pads = len(weight), _pair(stride), _pair(padding)
    # Whatever does not fit torch refuses: the kernels would read what is not there.
    if (
        weight.dim() != 4
        or min(*weight.shape, groups) < 1
        or outputs % groups
        or input.shape[1] != weight.shape[1] * groups
    ):
        return None
    if (bias is not None and bias.shape != (outputs,)) or min(strides) < 1 or min(pads) < 0:
        return None
    if any(
        size + 2 * pad < kernel
        for size, pad, kernel in zip(input.shape[2:], pads, weight.shape[2:], strict=True)
    ):
        return None
    found = Convolution.apply(input, weight, bias, strides, pads, index(groups))  # type: ignore[no-untyped-call]
    return cast(Tensor, found)


def _max_pool2d(
    input: Tensor,
    kernel_size: int | Pair,
    stride: int | Sequence[int] | None = None,
    padding: int | Pair = 0,
    dilation: int | Pair = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | None:
    """Pool; None: the kernels cannot."""
    kernel, pads = _pair(kernel_size), _pair(padding)
    unsaid = stride is None or (isinstance(stride, Sequence) and not len(stride))
    strides = kernel if stride is None or unsaid else _pair(stride)
    if return_indices or ceil_mode or _pair(dilation) != (1, 1) or not _computed(input):
        return None
    if min(*kernel, *strides) < 1 or min(pads) < 0:
        return None
    out = [
        (size + 2 * pad - window) // step + 1
        for size, pad, window, step in zip(input.shape[2:], pads, kernel, strides, strict=True)
    ]
    narrow = all(2 * pad <= window for pad, window in zip(pads, kernel, strict=True))
    if min(out) < 1 or not narrow or kernel[0] * kernel[1] > PLACES:
        return None
    size = out[0], out[1]
    return cast(Tensor, MaximumPooling.apply(input, kernel, strides, pads, size))  # type: ignore[no-untyped-call]


def _computed(images: Tensor, *others: Tensor) -> bool:
    """Return whether the kernels compute with such tensors."""
    if images.dim() != 4 or images.dtype not in REALS or not all(map(_plain, (images, *others))):
        return False
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0:
        return False
    # What a checkpoint computes again it does where no mode is: it must be the same, tensor by tensor.
    if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
        return False
    alike = all(one.dtype == images.dtype for one in others)
    return alike and images.numel() > 0 and len(images) >= library(images).lanes()


def _plain(tensor: Tensor) -> bool:
    """Return whether the numbers of a tensor lie in memory as its strides say."""
    kind = type(tensor) in (Tensor, nn.Parameter) and tensor.is_cpu
    return kind and tensor.layout is torch.strided and not tensor.is_neg()


def _pair(given: SupportsIndex | Sequence[SupportsIndex]) -> Pair:
    """Return rows and columns; negative ones for arguments that torch refuses."""
    both = [*given] * (2 if len(given) == 1 else 1) if isinstance(given, Sequence) else [given] * 2
    return (index(both[0]), index(both[1])) if len(both) == 2 else (-1, -1)


_OURS: Final[Mapping[object, Callable[..., Tensor | None]]] = {
    torch.conv2d: _conv2d,
    torch.max_pool2d: _max_pool2d,
    functional.max_pool2d: _max_pool2d,
}
