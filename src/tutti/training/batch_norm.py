"""BatchNorm over the whole batch of an update, split over the ranks.

    rank 0   count, mean, squares of its part │ all_reduce │ y = (x - mean) / sqrt(var + eps)
    rank 1   count, mean, squares of its part │            │ y = (x - mean) / sqrt(var + eps)
    rank 0   sum of dy (x - mean), sum of dy  │ all_reduce │ dx
    rank 1   sum of dy (x - mean), sum of dy  │            │ dx

So the layers compute what one process computes, and their running statistics are the same on all ranks.

Sources: Ioffe, Szegedy 2015, "Batch Normalization", arXiv 1502.03167, section 3 (forward and backward). Chan,
Golub, LeVeque 1979, "Updating Formulae and a Pairwise Algorithm for Computing Sample Variances" (means and
squares of parts).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from tutti.comm.base import Communicator

_NO_GRADIENT_OF_INPUTS = False, True, True


def batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """Return the BatchNorm layers of a module, including those with synchronised statistics."""
    return [one for one in module.modules() if isinstance(one, _BatchNorm)]


@contextmanager
def normalising(module: nn.Module, statistics: BatchStatistics | None) -> Iterator[None]:
    """Use these statistics in a module's BatchNorm layers inside the block; None: each rank's own."""
    layers = [] if statistics is None else batch_norms(module)
    if statistics is not None:
        statistics.normalise(layers)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


class BatchStatistics:
    """The statistics of a batch over `comm`; `present` returns whether this rank's samples count."""

    def __init__(self, comm: Communicator, present: Callable[[], bool] = lambda: True) -> None:
        self._comm, self.present = comm, present

    @contextmanager
    def absent(self) -> Iterator[None]:
        """Take part without samples: forward and backward passes inside do not count."""
        before, self.present = self.present, lambda: False
        try:
            yield
        finally:
            self.present = before

    def normalise(self, layers: Iterable[_BatchNorm]) -> None:
        """Let layers normalise by the whole batch: their training forward and backward are collective."""
        for layer in layers:
            vars(layer)["forward"] = MethodType(self._forward_of(type(layer).forward), layer)

    def _forward_of(self, own: Any) -> Any:
        def forward(layer: _BatchNorm, inputs: Tensor) -> Tensor:
            return self._normalised(layer, inputs) if layer.training else own(layer, inputs)

        return forward

    def _normalised(self, layer: _BatchNorm, inputs: Tensor) -> Tensor:
        of: Any = layer
        of._check_input_dim(inputs)
        apply: Any = _Normalised.apply
        output, mean, variance, count = apply(inputs, layer.weight, layer.bias, layer.eps, self)
        if layer.track_running_stats and layer.running_mean is not None:
            _track(layer, mean, variance, count)
        return cast("Tensor", output)

    def of_all(self, count: int, mean: Tensor, squares: Tensor) -> tuple[int, Tensor, Tensor]:
        """Return the count, mean and variance over all ranks, in float64 (collective).

        `count`, `mean` and `squares` (the sum of (x - mean)²) are this rank's, for each channel. ValueError:
        there is only one number in each channel.
        """
        ranks, width = self._comm.size, 1 + 2 * len(mean)
        every = torch.zeros(ranks, width, dtype=torch.float64)
        if count:
            every[self._comm.rank] = torch.cat([torch.tensor([count]), mean.cpu(), squares.cpu()])
        self._comm.all_reduce(every.view(-1))  # Rows of others are 0: faster than to gather so little.
        counts, means = every[:, :1], every[:, 1 : 1 + len(mean)]
        total = counts.sum()
        if total < 2:
            raise ValueError("BatchNorm needs more than one number in each channel to train on")
        whole = (counts * means).sum(0) / total
        spread = (every[:, 1 + len(mean) :] + counts * (means - whole).square()).sum(0)
        return int(total), whole, spread / total

    def sum(self, vector: Tensor) -> Tensor:
        """Return the sum over all ranks (collective), in float64 on the CPU."""
        sums = vector.double().cpu()
        self._comm.all_reduce(sums)
        return sums


class _Normalised(Function):
    """(x - mean) / sqrt(var + eps) * weight + bias, by channel, with the statistics of all ranks."""

    @staticmethod
    @override
    def forward(
        ctx: Any, inputs: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, of: BatchStatistics
    ) -> tuple[Tensor, Tensor, Tensor, int]:
        exact = inputs.to(torch.promote_types(inputs.dtype, torch.float32))
        count = inputs.numel() // inputs.shape[1]
        shift = exact[:1].transpose(0, 1).flatten(1).mean(1)
        ones = torch.ones_like(shift)
        # Around a value near the mean no digits are lost. Both calls are sweeps in kernels of torch.
        moved = functional.batch_norm(exact, shift, ones, eps=0.0)
        squares, total = _sums(moved, moved, torch.zeros_like(shift), ones)
        local = total.double() / count
        spread = squares.double() - count * local.square()
        ctx.present = of.present()
        seen = count if ctx.present else 0
        whole, *both = of.of_all(seen, shift.double() + local, spread)
        mean, variance = (one.to(shift) for one in both)
        output = functional.batch_norm(exact, mean, variance, weight, bias, eps=eps)
        ctx.save_for_backward(exact, weight, mean, (variance + eps).rsqrt())
        ctx.of, ctx.count, ctx.dtype = of, whole, inputs.dtype
        ctx.mark_non_differentiable(mean, variance)
        return output.to(inputs.dtype), mean, variance, whole

    @staticmethod
    @once_differentiable
    @override
    def backward(ctx: Any, grad: Tensor, *_: object) -> Any:
        inputs, weight, mean, inverse = ctx.saved_tensors
        grad = grad.to(inputs.dtype)
        along, total = _sums(grad, inputs, mean, inverse)
        own = torch.cat([along, total])
        along_all, total_all = ctx.of.sum(own if ctx.present else own.zero_()).to(mean).chunk(2)
        if not ctx.present:
            return torch.zeros_like(inputs, dtype=ctx.dtype), None, None, None, None
        scale = inverse if weight is None else inverse * weight
        slope = -scale * inverse * along_all / ctx.count
        offset = -scale * total_all / ctx.count - slope * mean
        channels = (1, -1) + (1,) * (inputs.dim() - 2)
        found = grad * scale.view(channels)
        found.addcmul_(inputs, slope.view(channels)).add_(offset.view(channels))
        return found.to(ctx.dtype), *((along, total) if weight is not None else (None, None)), None, None


def _sums(grad: Tensor, inputs: Tensor, mean: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums of grad * (inputs - mean) * inverse and of grad in each channel."""
    backward = torch.ops.aten.native_batch_norm_backward
    _, along, total = backward(
        grad, inputs, None, None, None, mean, inverse, True, 0.0, _NO_GRADIENT_OF_INPUTS
    )
    return along, total


@torch.no_grad()
def _track(layer: _BatchNorm, mean: Tensor, variance: Tensor, count: int) -> None:
    """Update the running statistics, as torch does, with the unbiased variance."""
    factor = 0.0 if layer.momentum is None else layer.momentum
    if layer.num_batches_tracked is not None:
        layer.num_batches_tracked.add_(1)
        factor = 1 / float(layer.num_batches_tracked) if layer.momentum is None else factor
    for running, new in (
        (layer.running_mean, mean),
        (layer.running_var, variance * (count / (count - 1))),
    ):
        if running is not None:
            running.mul_(1 - factor).add_(new, alpha=factor)
