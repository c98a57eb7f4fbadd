"""Clipping over flat vectors."""

from __future__ import annotations

import math

import pytest
import torch

from tutti.optim.clipping import clip, scale_for, scale_there
from tutti.replica import squared_norm


def test_the_squared_norm_is_exact_to_float64() -> None:
    # In float32, 2^24 + 1 is 2^24: the small ones would be lost.
    vector = torch.ones(1001)
    vector[0] = 4096.0
    assert squared_norm([vector, torch.tensor([3.0])]) == pytest.approx(4096.0**2 + 1000 + 9, abs=1e-6)


def test_a_norm_that_is_not_finite_stays_visible() -> None:
    assert math.isnan(scale_for(math.nan, 1.0))
    assert scale_for(math.inf, 1.0) == 0.0


@pytest.mark.parametrize(("norm", "value"), [(None, None), (0.5, None), (None, 0.1), (0.5, 0.1), (1e6, 1e6)])
def test_a_whole_gradient_is_clipped_as_torch_does(norm: float | None, value: float | None) -> None:
    gradients = [torch.linspace(-1, 1, 7), torch.linspace(0, 2, 5)]
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    if value is not None:
        torch.nn.utils.clip_grad_value_(parameters, value)
    if norm is not None:
        torch.nn.utils.clip_grad_norm_(parameters, norm)
    clip(gradients, norm, value)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad)


@pytest.mark.parametrize("most", [0.5, 1e6])
def test_complex_gradients_are_clipped_as_torch_does(most: float) -> None:
    gradients = [torch.tensor([3 - 4j, 0.5j], dtype=torch.complex128), torch.ones(2, dtype=torch.float64)]
    parameters = [torch.nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_(parameters, most)
    assert scale_there(gradients, most).item() == pytest.approx(min(1.0, most / math.sqrt(27.25)), rel=1e-6)
    clip(gradients, most, None)
    for parameter, gradient in zip(parameters, gradients, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-12, atol=0)
