"""Precision, layout and device."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from tests.batch_last import needs_compiler
from tutti.comm.base import Communicator
from tutti.comm.virtual.world import VirtualWorld
from tutti.replica import Replica
from tutti.training.evaluation import average_buffers
from tutti.training.precision import Arithmetic


class Notes(nn.Module):
    """Notes the dtype that its product has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs @ self.weight
        self.seen = outputs.dtype
        return outputs


@pytest.mark.parametrize(
    ("precision", "weights", "product", "outputs"),
    [
        ("fp32", torch.float32, torch.float32, torch.float32),
        ("bf16", torch.float32, torch.bfloat16, torch.float32),
        ("fp64", torch.float64, torch.float64, torch.float64),
    ],
)
def test_each_precision_computes_in_its_own(
    precision: str, weights: torch.dtype, product: torch.dtype, outputs: torch.dtype
) -> None:
    arithmetic = Arithmetic(precision)
    module = arithmetic.prepare(Notes())
    found = arithmetic.forward(module, arithmetic.inputs(torch.ones(2, 8)))
    assert (module.weight.dtype, module.seen, found.dtype) == (weights, product, outputs)
    found.sum().backward()
    assert module.weight.grad.dtype == weights


def test_channels_last_holds_for_weights_and_images_and_leaves_vectors() -> None:
    arithmetic = Arithmetic(layout="channels_last")
    module = arithmetic.prepare(nn.Conv2d(3, 8, 3))
    assert module.weight.is_contiguous(memory_format=torch.channels_last)
    images = arithmetic.inputs(torch.zeros(2, 3, 8, 8))
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert arithmetic.inputs(torch.zeros(2, 8)).is_contiguous()


@needs_compiler
def test_batch_last_computes_by_the_kernels_and_leaves_what_is_outside_alone() -> None:
    arithmetic = Arithmetic("fp64", "batch_last")
    module = arithmetic.prepare(nn.Conv2d(1, 2, 3))
    images = arithmetic.inputs(torch.randn(16, 1, 5, 5))
    found = arithmetic.forward(module, images)
    assert type(found.grad_fn).__name__ == "ConvolutionBackward"
    assert type(module(images).grad_fn).__name__ == "ConvolutionBackward0"
    assert_close(found, Arithmetic("fp64").forward(module, images), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("layout", "samples", "channels"),
    [("channels_last", 1, 4), pytest.param("batch_last", 16, 1, marks=needs_compiler)],
)
def test_the_gradients_of_an_instance_norm_do_not_depend_on_the_layout(
    layout: str, samples: int, channels: int
) -> None:
    torch.manual_seed(0)
    images = torch.randn(samples, channels, 8, 8)
    module = nn.Sequential(nn.InstanceNorm2d(channels, affine=True), nn.Conv2d(channels, 4, 3))
    found = []
    for one in ("contiguous", layout):
        here = Arithmetic("fp32", one)
        model = here.prepare(copy.deepcopy(module))
        here.forward(model, here.inputs(images)).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters()])
    # Sums of some thousand products: rounding is far below a thousandth of them, a wrong gradient far above.
    assert_close(found[1], found[0], rtol=1e-3, atol=1e-2)


class OfKeras(nn.Module):
    """As a model of Keras: told in each call whether it is training, with statistics as parameters."""

    __module__ = "keras.src.models"

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.mean = nn.Parameter(torch.zeros(2, 1), requires_grad=False)
        self.drawn = nn.Parameter(torch.zeros(1, dtype=torch.int64), requires_grad=False)

    def forward(self, inputs: torch.Tensor, training: bool = False) -> torch.Tensor:
        return inputs * self.weight * (2 if training else 1)


def test_a_model_of_keras_is_told_in_each_call_whether_it_is_training() -> None:
    module, inputs = OfKeras(), torch.ones(1, 2)
    assert Arithmetic().forward(module.train(), inputs).tolist() == [[2, 2]]
    assert Arithmetic().forward(module.eval(), inputs).tolist() == [[1, 1]]


def test_statistics_of_a_model_of_keras_are_averaged_as_buffers_are() -> None:
    def program(comm: Communicator) -> tuple[list[list[float]], int]:
        module = OfKeras()
        replica = Replica(module)
        module.mean.fill_(comm.rank)
        module.drawn.fill_(comm.rank)
        average_buffers(replica, comm)
        return module.mean.tolist(), int(module.drawn)

    assert VirtualWorld(2).run(program) == [([[0.5], [0.5]], 0), ([[0.5], [0.5]], 1)]
