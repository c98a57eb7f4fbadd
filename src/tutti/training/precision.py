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
"""The layout that tensors have unless one is chosen."""

FEW: Final = 2
"""Samples that tell whether a model takes them."""

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SHORT = tuple(_HALF.values())


@dataclass(frozen=True)
class Arithmetic:
    """The precision, memory layout and device of a model's computations.

    Attributes:
        precision: "fp32"; "bf16" or "fp16": the weights stay fp32, matrix products and convolutions run in
            bfloat16 or float16 (autocast); or "fp64", to compare runs beyond the rounding of fp32.
        layout: "contiguous"; "channels_last" for 4-d inputs and weights; or "batch_last", in which the
            samples of images lie side by side and kernels of our own compute, on a CPU.
        device: "cpu" or "cuda".

    Raises:
        BadOption: a device that this machine does not have; a layout that is not for it, or not for the
            precision.
    """

    precision: str = "fp32"
    layout: str = CONTIGUOUS
    device: str = "cpu"

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
        """Move `module` to this precision, layout and device, in place.

        Call it before the module becomes a `Replica`: it makes new tensors.

        Raises:
            BadOption: the layout needs a C compiler, and there is none that works.
        """
        if self.layout == BATCH_LAST:
            kernels(REAL_TYPES[self.precision])
        module.to(device=self.device)
        if self.precision == "fp64":
            # Not `module.double()`, which makes complex numbers real.
            module._apply(_doubled)  # type: ignore[no-untyped-call]
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
        """Return whether the device is a GPU with room for `nbytes` bytes, and as much again to compute."""
        return self.device != "cpu" and 2 * nbytes <= torch.cuda.mem_get_info()[0]

    @property
    def telling_samples(self) -> int:
        """The samples that tell whether a model takes them: so many that kernels of our own compute them."""
        return VECTOR_BYTES // torch.float32.itemsize if self.layout == BATCH_LAST else FEW

    @property
    def is_asynchronous(self) -> bool:
        """True if the device works on while the CPU goes on: to read one of its numbers is to wait for it."""
        return self.device != "cpu"

    def number(self, scalar: Tensor) -> float | Tensor:
        """The number in a scalar; if that would mean to wait for it, the scalar itself, without gradient."""
        return scalar.detach() if self.is_asynchronous else float(scalar.item())

    def inputs(self, inputs: Inputs) -> Inputs:
        """`inputs` of shape (n, *shape) as the model wants them; of several inputs each."""
        if not isinstance(inputs, Tensor):
            return mapped(inputs, lambda one: cast(Tensor, self.inputs(one)))
        inputs = self._placed(inputs)
        if self.layout == "channels_last" and inputs.dim() == 4:
            return _channels_last(inputs)
        return inputs

    def targets(self, targets: Tensor) -> Tensor:
        """`targets` where the model's outputs are, floating-point ones in their precision."""
        return self._placed(targets)

    def forward(self, module: Callable[..., object], inputs: Inputs) -> Tensor:
        """Return the output of `module`, in fp32 or fp64: loss and metrics are computed in full precision."""
        found = self.call(module, inputs)
        return found if isinstance(found, Tensor) and found.dtype not in _SHORT else self.output(found)

    def output(self, outputs: object) -> Tensor:
        """Return the output among all that a model returned, in fp32 or fp64; see `the_output`."""
        found = outputs if isinstance(outputs, Tensor) else the_output(outputs)
        return found.float() if found.dtype in _SHORT else found

    def call(self, module: Callable[..., object], inputs: Inputs) -> object:
        """All that `module` returns; it gets inputs by keyword, if they have names, or by position."""
        if self.layout == BATCH_LAST:
            with BatchLast():
                return self._call(module, inputs)
        return self._call(module, inputs)

    def _call(self, module: Callable[..., object], inputs: Inputs) -> object:
        told: dict[str, bool] = {}
        kind: Any = type(module)
        if _is_of_keras(kind) and isinstance(module, nn.Module):
            inputs, told = of_keras.arguments(module, inputs), {"training": module.training}
        if self.precision in _HALF:
            with torch.autocast(self.device, dtype=_HALF[self.precision]):
                return _called(module, inputs, told)
        if isinstance(inputs, Tensor):
            return module(inputs, **told)
        return _called(module, inputs, told)

    def _placed(self, tensor: Tensor) -> Tensor:
        if self.device != "cpu" and tensor.is_cpu:
            # A copy from pinned memory goes on while the CPU does; torch keeps that memory until it is done.
            tensor = tensor.pin_memory().to(self.device, non_blocking=True)
        if self.precision == "fp64" and tensor.is_floating_point():
            tensor = tensor.double()
        return tensor


def _called(module: Callable[..., object], inputs: Inputs, told: Mapping[str, bool]) -> object:
    if isinstance(inputs, Tensor):
        return module(inputs, **told)
    if isinstance(inputs, dict):
        return module(**inputs, **told)
    return module(*inputs, **told)


def _channels_last(images: Tensor) -> Tensor:
    """Images with their channels last in memory, and strides that say so.

    Those of images of one channel may say either, and `contiguous` leaves them as they are: cuDNN then takes
    them for contiguous ones and has to turn all that the first convolution computes.
    """
    _, channels, height, width = images.shape
    strides = height * width * channels, 1, width * channels, channels
    return images.contiguous(memory_format=torch.channels_last).as_strided(images.shape, strides)


def _with_contiguous_gradient(_module: nn.Module, _inputs: object, outputs: Tensor) -> None:
    """Have the gradient of an instance norm's outputs come as the norm's inputs lie in memory.

    torch 2.13 takes one for the other on a CPU where one sample, or one channel, makes strides ambiguous:
    the gradients that it computes are wrong then.
    """
    if outputs.requires_grad:
        outputs.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]


def _doubled(tensor: Tensor) -> Tensor:
    """A floating-point or complex tensor in numbers of 64 bits; any other as it is."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.double() if tensor.is_floating_point() else tensor


def is_of_keras(model: object) -> bool:
    """Return whether a model is of Keras: `train()` tells it nothing, each call must say whether it trains.

    Its statistics (BatchNorm's) are parameters that are not trained, where torch's are buffers.
    """
    kind: Any = type(model)
    return _is_of_keras(kind)


@cache
def _is_of_keras(kind: Any) -> bool:
    return any(base.__module__.partition(".")[0] == "keras" for base in kind.__mro__)


def the_output(outputs: object) -> Tensor:
    """Return the output among all that a model returned: of it losses and metrics by name are computed.

        a tensor                          itself
        an object with `logits`           these, as of Hugging Face's models
        a dict                            its "logits", or else its "output"
        a tuple or a list                 its first element

    Raises:
        BadModel: nobody can know which it is.
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
        f"the model returns a {type(outputs).__name__}{keys}, and which tensor of it is the output is not "
        "known; return a tensor, a tuple that begins with it, or a dict or an object that has it as 'logits' "
        "or 'output'"
    )


FP32 = Arithmetic()
"""The default: fp32, contiguous, on the CPU."""
