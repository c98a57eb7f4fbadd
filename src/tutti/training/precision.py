"""The precision, memory layout and device in which a model computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

from tutti.batch_last import BATCH_LAST, REAL_TYPES
from tutti.batch_last.compiler import kernels
from tutti.batch_last.functions import VECTOR_BYTES
from tutti.batch_last.mode import BatchLast
from tutti.data.columns import Inputs, mapped
from tutti.errors import BadModel, BadOption
from tutti.training import of_keras

CONTIGUOUS: Final = "contiguous"
"""The default layout."""

FEW: Final = 2
"""The number of samples on which a model is tried."""

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SHORT = tuple(_HALF.values())


@dataclass(frozen=True)
class Arithmetic:
    """The precision, memory layout and device of a model's computations; BadOption if they do not fit.

    "bf16" and "fp16" run products and convolutions in half precision (autocast) with weights in fp32. In the
    layout "batch_last" the samples of images lie next to each other in memory, for tutti's own kernels.
    """

    precision: str = "fp32"  # or "bf16", "fp16", "fp64"
    layout: str = CONTIGUOUS  # or "channels_last", "batch_last" on a CPU
    device: str = "cpu"  # or "cuda"

    def __post_init__(self) -> None:
        if self.device != "cpu" and not torch.cuda.is_available():
            raise BadOption(
                f"--device is '{self.device}', but torch finds no GPU here: 'tutti doctor' says why; use "
                "--device cpu"
            )
        if self.layout == BATCH_LAST and (self.device != "cpu" or self.precision not in REAL_TYPES):
            raise BadOption(
                f"--layout {BATCH_LAST} is for fp32 and fp64 on the CPU, not for {self.precision} on "
                f"{self.device}; leave it out"
            )

    def prepare(self, module: nn.Module) -> nn.Module:
        """Move `module` to this precision, layout and device, in place, before it becomes a `Replica`."""
        if self.layout == BATCH_LAST:
            kernels(REAL_TYPES[self.precision])
        module.to(device=self.device)
        if self.precision == "fp64":
            module.double()
        if is_of_keras(module):
            of_keras.prepare(module, double=self.precision == "fp64")
        if self.layout == "channels_last":
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        if self.layout != CONTIGUOUS and self.device == "cpu":
            for one in module.modules():
                if isinstance(one, nn.modules.instancenorm._InstanceNorm):
                    one.register_forward_hook(_with_contiguous_gradient)
        return module

    def has_room_for(self, nbytes: int) -> bool:
        """Return whether the device is a GPU with room for twice `nbytes` bytes."""
        return self.device != "cpu" and 2 * nbytes <= torch.cuda.mem_get_info()[0]

    @property
    def telling_samples(self) -> int:
        """The number of samples on which to try a model: enough for the kernels of batch_last."""
        return VECTOR_BYTES // torch.float32.itemsize if self.layout == BATCH_LAST else FEW

    @property
    def is_asynchronous(self) -> bool:
        """True if the CPU has to wait for a number on the device."""
        return self.device != "cpu"

    def number(self, scalar: Tensor) -> float | Tensor:
        """Return the number in a scalar, or on a GPU the scalar without gradient."""
        return scalar.detach() if self.is_asynchronous else float(scalar.item())

    def inputs(self, inputs: Inputs) -> Inputs:
        """Return `inputs` of shape (n, *shape), one or several, as the model takes them."""
        if not isinstance(inputs, Tensor):
            return mapped(inputs, lambda one: cast(Tensor, self.inputs(one)))
        inputs = self._placed(inputs)
        if self.layout == "channels_last" and inputs.dim() == 4:
            return _channels_last(inputs)
        return inputs

    def targets(self, targets: Tensor) -> Tensor:
        """Return `targets` on the device, floating-point ones in the precision of the outputs."""
        return self._placed(targets)

    def forward(self, module: Callable[..., object], inputs: Inputs) -> Tensor:
        """Return the output of `module` in fp32 or fp64, for loss and metrics in full precision."""
        found = self.call(module, inputs)
        return found if isinstance(found, Tensor) and found.dtype not in _SHORT else self.output(found)

    def output(self, outputs: object) -> Tensor:
        """Return `the_output` of a model in fp32 or fp64."""
        found = outputs if isinstance(outputs, Tensor) else the_output(outputs)
        return found.float() if found.dtype in _SHORT else found

    def call(self, module: Callable[..., object], inputs: Inputs) -> object:
        """Call `module` with inputs by keyword, if they have names, or by position."""
        if self.layout == BATCH_LAST:
            with BatchLast():
                return self._call(module, inputs)
        return self._call(module, inputs)

    def _call(self, module: Callable[..., object], inputs: Inputs) -> object:
        options: dict[str, bool] = {}
        kind: Any = type(module)
        if _is_of_keras(kind) and isinstance(module, nn.Module):
            inputs, options = of_keras.arguments(module, inputs), {"training": module.training}
        if self.precision in _HALF:
            with torch.autocast(self.device, dtype=_HALF[self.precision]):
                return _called(module, inputs, options)
        return _called(module, inputs, options)

    def _placed(self, tensor: Tensor) -> Tensor:
        if self.device != "cpu" and tensor.is_cpu:
            # A copy from pinned memory goes on while the CPU does; torch keeps that memory until it is done.
            tensor = tensor.pin_memory().to(self.device, non_blocking=True)
        if self.precision == "fp64" and tensor.is_floating_point():
            tensor = tensor.double()
        return tensor


def _called(module: Callable[..., object], inputs: Inputs, options: Mapping[str, bool]) -> object:
    if isinstance(inputs, Tensor):
        return module(inputs, **options)
    if isinstance(inputs, dict):
        return module(**inputs, **options)
    return module(*inputs, **options)


def _channels_last(images: Tensor) -> Tensor:
    """Return images with channels last in memory, and matching strides.

    The strides of images with one channel are ambiguous: cuDNN takes them for contiguous, and has to
    transpose the outputs of the first convolution.
    """
    _, channels, height, width = images.shape
    strides = height * width * channels, 1, width * channels, channels
    return images.contiguous(memory_format=torch.channels_last).as_strided(images.shape, strides)


def _with_contiguous_gradient(_module: nn.Module, _inputs: object, outputs: Tensor) -> None:
    """Make the gradient of an instance norm's outputs contiguous.

    On a CPU torch 2.13 computes wrong gradients where one sample, or one channel, makes strides ambiguous.
    """
    if outputs.requires_grad:
        outputs.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]


def is_of_keras(model: object) -> bool:
    """Return whether this is a Keras model: each call passes `training`, and statistics are parameters."""
    kind: Any = type(model)
    return _is_of_keras(kind)


@cache
def _is_of_keras(kind: Any) -> bool:
    return any(base.__module__.partition(".")[0] == "keras" for base in kind.__mro__)


def the_output(outputs: object) -> Tensor:
    """Return the tensor for losses and metrics among a model's outputs.

    a tensor                          itself
    an object with `logits`           these, as of Hugging Face's models
    a dict                            its "logits", or else its "output"
    a tuple or a list                 its first element
    """
    found = outputs
    if isinstance(outputs, Mapping):
        found = outputs.get("logits", outputs.get("output"))
    elif isinstance(getattr(outputs, "logits", None), Tensor):
        found = outputs.logits  # type: ignore[attr-defined]
    elif isinstance(outputs, tuple | list) and outputs:
        found = outputs[0]
    if isinstance(found, Tensor):
        return found
    keys = f" of {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else ""
    raise BadModel(
        f"the model returns a {type(outputs).__name__}{keys}; return a tensor, a tuple that begins with it, "
        "or a dict or an object that has it as 'logits' or 'output'"
    )


FP32 = Arithmetic()
"""The default: fp32, contiguous, on the CPU."""
