"""Convolution and pooling by the kernels are those of torch, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from tests.batch_last import needs_compiler
from tutti.batch_last.functions import Convolution, MaximumPooling
from tutti.batch_last.mode import BatchLast

pytestmark = needs_compiler

WIDEST = 16
"""Samples that the vector of any processor has at the most."""


def images(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def gradients(compute: Callable[..., Tensor], *inputs: Tensor, of_sizes: bool = False) -> list[Tensor]:
    """The output, and the gradients of all inputs for a gradient of the output that is the same each time."""
    leaves = [one.detach().clone().requires_grad_() for one in inputs]
    output = compute(*leaves)
    gradient = images(*output.shape).float().to(output.dtype)
    output.backward(gradient.abs() if of_sizes else gradient)
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def assert_same_as_torch(compute: Callable[..., Tensor], *inputs: Tensor) -> None:
    with BatchLast():
        found = gradients(compute, *inputs)
    assert_close(found, gradients(compute, *inputs), rtol=1e-12, atol=1e-12)


def made_by(compute: Callable[[], Tensor]) -> str:
    with BatchLast():
        output = compute()
    return type(output.grad_fn).__name__.removesuffix("Backward")


@pytest.mark.parametrize(
    ("maps", "outputs", "kernel", "options"),
    [
        (1, 6, (5, 5), {"padding": 2}),
        (6, 16, (5, 5), {}),
        (3, 7, (3, 3), {"padding": 1, "stride": 2}),
        (2, 5, (2, 7), {"padding": (1, 3), "stride": (1, 3)}),
        (5, 13, (1, 1), {}),
        (4, 8, (3, 3), {"groups": 2, "padding": 1}),
        (9, 9, (3, 3), {"groups": 9, "stride": 2}),
        (2, 3, (3, 3), {"padding": 3}),
        (2, 3, (1, 1), {"stride": 3}),
        (1, 1, (9, 11), {}),
    ],
)
def test_a_convolution_equals_torchs(
    maps: int, outputs: int, kernel: tuple[int, int], options: dict[str, int | tuple[int, int]]
) -> None:
    groups = options.get("groups", 1)
    assert isinstance(groups, int)
    inputs = images(WIDEST, maps, 9, 11), images(outputs, maps // groups, *kernel), images(outputs)
    assert_same_as_torch(lambda x, weight, bias: torch.conv2d(x, weight, bias, **options), *inputs)
    assert (
        made_by(lambda: torch.conv2d(inputs[0], inputs[1].requires_grad_(), **options))
        == Convolution.__name__
    )


@pytest.mark.parametrize(
    ("kernel", "options"),
    [
        (2, {}),
        (3, {"stride": 2, "padding": 1}),
        ((2, 3), {"stride": (3, 1)}),
        (3, {"stride": 1}),
        ((9, 11), {}),
    ],
)
def test_maximum_pooling_equals_torchs(
    kernel: int | tuple[int, int], options: dict[str, int | tuple[int, int]]
) -> None:
    inputs = images(WIDEST, 3, 9, 11)
    assert_same_as_torch(lambda x: functional.max_pool2d(x, kernel, **options), inputs)
    assert made_by(lambda: functional.max_pool2d(inputs.requires_grad_(), kernel, **options)) == (
        MaximumPooling.__name__
    )


@pytest.mark.parametrize("samples", [16, 17, 23, 31, 32, 45])
def test_samples_that_fill_no_vector_are_counted_once(samples: int) -> None:
    inputs = images(samples, 2, 5, 6), images(7, 2, 3, 3), images(7)
    assert_same_as_torch(
        lambda x, weight, bias: functional.max_pool2d(torch.conv2d(x, weight, bias, padding=1).relu(), 2),
        *inputs,
    )


def test_of_equal_numbers_the_first_gets_the_gradient() -> None:
    ties = torch.randint(0, 2, (WIDEST, 4, 6, 6), generator=torch.Generator().manual_seed(0)).double()
    assert_same_as_torch(lambda x: functional.max_pool2d(x, 3), ties)


def test_pooling_passes_nan_and_infinity_on() -> None:
    seen = images(WIDEST, 2, 4, 4)
    seen[0, 0, 0, 1], seen[1, 0, :2, :2], seen[2] = torch.nan, -torch.inf, torch.inf
    with BatchLast():
        found = functional.max_pool2d(seen, 2)
    assert_close(found, functional.max_pool2d(seen, 2), equal_nan=True, rtol=0, atol=0)


def test_float32_differs_by_rounding_alone() -> None:
    inputs = [one.float() for one in (images(32, 6, 14, 14), images(16, 6, 5, 5), images(16))]
    exact = [one.double() for one in inputs]
    with BatchLast():
        found = gradients(torch.conv2d, *inputs)
    sums_of_sizes = gradients(torch.conv2d, *(one.abs() for one in exact), of_sizes=True)
    for one, right, sizes, terms in zip(
        found, gradients(torch.conv2d, *exact), sums_of_sizes, (151, 400, 3200, 3200), strict=True
    ):
        # Higham, Accuracy and Stability of Numerical Algorithms, (3.5): a sum of n products, in any order.
        rounding = terms * torch.finfo(torch.float32).eps / 2
        assert bool(((one - right).abs() <= rounding / (1 - rounding) * sizes).all())


def test_a_model_trains_as_with_torch() -> None:
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3, bias=False)
    model = nn.Sequential(*layers, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(6 * 3 * 3, 2)).double()
    inputs = images(WIDEST, 1, 12, 12)
    parameters = list(model.parameters())

    def trained() -> list[Tensor]:
        output = model(inputs)
        return [output, *torch.autograd.grad(output.square().sum(), parameters)]

    with BatchLast():
        found = trained()
    assert_close(found, trained(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "compute",
    [
        lambda x, weight: torch.conv2d(x[:1], weight),
        lambda x, weight: torch.conv2d(x, weight, dilation=2),
        lambda x, weight: torch.conv2d(x, weight, padding="same"),
        lambda x, weight: torch.conv2d(x.bfloat16(), weight.bfloat16()),
        lambda x, weight: torch.conv2d(x[0], weight),
        lambda x, weight: functional.max_pool2d(torch.conv2d(x[:1], weight), 2),
        lambda x, weight: functional.max_pool2d(x[:, :, :5, :5] * weight.sum(), 2, ceil_mode=True),
        lambda x, weight: functional.max_pool2d(x * weight.sum(), 2, return_indices=True)[0],
        lambda x, weight: functional.max_pool2d(x * weight.sum(), 2, dilation=2),
    ],
)
def test_torch_computes_where_kernels_cannot(compute: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, weight = images(WIDEST, 2, 6, 6), images(3, 2, 3, 3).requires_grad_()
    assert made_by(lambda: compute(x, weight)) not in (Convolution.__name__, MaximumPooling.__name__)
    assert_same_as_torch(lambda seen: compute(seen, weight), x)


@pytest.mark.parametrize(
    ("weight", "options", "message"),
    [
        (images(1, 2, 5, 5), {}, "Kernel size can't be greater than actual input size"),
        (images(4, 3, 3, 3), {}, "expected input"),
        (images(4, 2, 3, 3), {"bias": images(3)}, "expected bias to be 1-dimensional with 4 elements"),
        (images(4, 2, 3, 3), {"stride": 0}, "non-positive stride"),
        (images(4, 2, 3, 3), {"padding": -1}, "negative padding"),
        (images(4, 2, 3, 3), {"stride": (1, 1, 1)}, "stride"),
        (images(3, 1, 3, 3), {"groups": 2}, "expected weight to be divisible by 2"),
    ],
)
def test_torch_refuses_what_does_not_fit(weight: Tensor, options: dict[str, Any], message: str) -> None:
    with BatchLast(), pytest.raises(RuntimeError, match=message):
        torch.conv2d(images(WIDEST, 2, 3, 3), weight, **options)


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_are_computed_again_give_the_gradients_of_torch(reentrant: bool) -> None:
    weight = images(3, 2, 3, 3)

    def layers(x: Tensor) -> Tensor:
        return functional.max_pool2d(torch.conv2d(x, weight).relu(), 2)

    def compute(x: Tensor) -> Tensor:
        return cast(Tensor, checkpoint(layers, x, use_reentrant=reentrant))

    x = images(WIDEST, 2, 6, 6)
    with BatchLast():
        leaf = x.clone().requires_grad_()
        output = compute(leaf)
    output.square().sum().backward()
    other = x.clone().requires_grad_()
    layers(other).square().sum().backward()
    assert_close(leaf.grad, other.grad, rtol=1e-12, atol=1e-12)


def test_gradients_cannot_be_differentiated_again() -> None:
    x, weight = images(WIDEST, 2, 6, 6), images(3, 2, 3, 3).requires_grad_()
    with BatchLast():
        output = functional.max_pool2d(torch.conv2d(x, weight), 2)
    (gradient,) = torch.autograd.grad(output.square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_layers_in_place_may_follow() -> None:
    weight = images(3, 2, 3, 3)

    def compute(x: Tensor, weight: Tensor) -> Tensor:
        return functional.max_pool2d(functional.conv2d(x, weight).relu_(), 2).mul_(2)

    assert_same_as_torch(compute, images(WIDEST, 2, 6, 6), weight)


def test_torch_func_and_autocast_are_left_to_torch() -> None:
    x, weight = images(WIDEST, 2, 6, 6), images(3, 2, 3, 3)
    loss = torch.func.grad(lambda weight: torch.conv2d(x, weight).square().sum())
    expected = loss(weight)
    with BatchLast():
        assert_close(loss(weight), expected)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.conv2d(x.float(), weight.float()).dtype == torch.bfloat16
