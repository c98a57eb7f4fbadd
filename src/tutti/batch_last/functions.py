"""The kernels as functions that torch differentiates."""

from __future__ import annotations

import ctypes
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tutti.batch_last.compiler import Shape, kernels

REALS: Final = {torch.float32: "float", torch.float64: "double"}
"""The types in C of what the kernels compute with."""

VECTOR_BYTES: Final = 64
"""The length of the longest vectors."""

Pair: TypeAlias = tuple[int, int]
"""Rows and columns."""


def library(tensor: Tensor) -> ctypes.CDLL:
    """Return the kernels for the dtype of a tensor."""
    return kernels(REALS[tensor.dtype])


def batch_last(images: Tensor) -> Tensor:
    """Return images of shape (n, maps, height, width) as (maps, height, width, n), contiguous."""
    return images.permute(1, 2, 3, 0).contiguous()


def _room(numbers: Tensor, samples: int, maps: int, height: int, width: int) -> Tensor:
    """Return empty images of shape (n, maps, height, width), with the samples next to each other.

    They are no view of other memory: torch refuses to change views that a function returns in place, as ReLUs
    do.
    """
    strides = 1, height * width * samples, width * samples, samples
    return numbers.new_empty_strided((samples, maps, height, width), strides)


class Convolution(Function):
    """The convolution of images with filters, as `torch.conv2d`."""

    @staticmethod
    def forward(
        ctx: Any,
        images: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Pair,
        padding: Pair,
        groups: int,
    ) -> Tensor:
        """Convolve images of shape (n, maps, height, width)."""
        stored, weights = batch_last(images), weight.contiguous()
        maps, height, width, samples = stored.shape
        outputs, _, *kernel = weights.shape
        out = [
            (size + 2 * p - k) // s + 1
            for size, p, k, s in zip((height, width), padding, kernel, stride, strict=True)
        ]
        shape = Shape(samples, maps, height, width, outputs, *out, *kernel, *stride, *padding, groups)
        found, packed = _room(stored, samples, outputs, *out), torch.empty_like(weights)
        added = None if bias is None else bias.contiguous()
        pointer = None if added is None else added.data_ptr()
        library(stored).convolve(
            shape, stored.data_ptr(), weights.data_ptr(), pointer, packed.data_ptr(), found.data_ptr()
        )
        ctx.save_for_backward(stored, weight)
        ctx.shape = shape
        return found

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of images, weight and bias, as far as they are needed."""
        stored, weight = ctx.saved_tensors
        shape, found, of = ctx.shape, batch_last(gradient), library(stored)
        images = weights = bias = None
        if ctx.needs_input_grad[0]:
            images = _room(stored, shape.samples, shape.inputs, shape.height, shape.width)
            plain = weight.contiguous()
            packed = torch.empty_like(plain)
            of.input_gradient(shape, found.data_ptr(), plain.data_ptr(), packed.data_ptr(), images.data_ptr())
        if ctx.needs_input_grad[1]:
            weights = torch.empty_like(weight, memory_format=torch.contiguous_format)
            partial = stored.new_empty(weight.numel() * VECTOR_BYTES // stored.itemsize)
            of.weight_gradient(
                shape, stored.data_ptr(), found.data_ptr(), partial.data_ptr(), weights.data_ptr()
            )
        if ctx.needs_input_grad[2]:
            bias = found.sum((1, 2, 3))
        return images, weights, bias, None, None, None


class MaximumPooling(Function):
    """The largest number of each window of images, as `torch.max_pool2d`."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, kernel: Pair, stride: Pair, padding: Pair, out: Pair) -> Tensor:
        """Pool images of shape (n, maps, height, width) to those of height and width `out`."""
        stored = batch_last(images)
        maps, height, width, samples = stored.shape
        shape = Shape(samples, maps, height, width, maps, *out, *kernel, *stride, *padding, 1)
        outputs = _room(stored, samples, maps, *out)
        places = torch.empty(outputs.numel(), dtype=torch.uint8)
        library(stored).pool(shape, stored.data_ptr(), outputs.data_ptr(), places.data_ptr())
        ctx.save_for_backward(places)
        ctx.shape = shape
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the images."""
        (places,), shape = ctx.saved_tensors, ctx.shape
        found = batch_last(gradient)
        images = _room(found, shape.samples, shape.inputs, shape.height, shape.width)
        library(found).pool_gradient(shape, found.data_ptr(), places.data_ptr(), images.data_ptr())
        return images, None, None, None, None
