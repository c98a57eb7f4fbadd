"""What can be done about a gradient that was computed from weights which have moved on since."""

from __future__ import annotations

from torch import Tensor


def damping(staleness: int) -> float:
    """What to multiply the learning rate by: 1 / tau, and 1 for a gradient that is not stale.

    Zhang, Gupta, Lian, Liu 2016, "Staleness-aware Async-SGD for Distributed Deep Learning",
    arXiv:1511.05950, section 3.2: alpha = alpha_0 / tau where tau > 0.

    Args:
        staleness: tau, how many updates the weights have had since the gradient's were read.
    """
    return 1.0 / max(1, staleness)


def compensate(gradient: Tensor, now: Tensor, then: Tensor, strength: float) -> None:
    """Add to a gradient, in place, what the loss's curvature makes of the way that the weights have gone.

        g = g + lambda * g * g * (w_now - w_then)             (all products elementwise)

    Zheng et al. 2017, "Asynchronous Stochastic Gradient Descent with Delay Compensation", arXiv:1609.08326,
    equation 10 and algorithm 2 (DC-ASGD-c): g * g stands for the diagonal of the Hessian.

    Args:
        gradient: g, computed at `then`.
        now: the weights that it will be applied to.
        then: the weights that it was computed at.
        strength: lambda.
    """
    gradient.addcmul_(gradient * gradient, now - then, value=strength)


def compensate_adaptively(
    gradient: Tensor,
    mean_square: Tensor,
    now: Tensor,
    then: Tensor,
    strength: float,
    decay: float,
    epsilon: float = 1e-7,
) -> None:
    """The same with a strength for each element, which is smaller where gradients are large; in place.

        s = m s + (1 - m) g * g
        g = g + lambda_0 / sqrt(s + epsilon) * g * g * (w_now - w_then)

    Zheng et al. 2017, section 5 (DC-ASGD-a).

    Args:
        gradient: g, computed at `then`.
        mean_square: s, updated in place; zeros at first.
        now: the weights that the gradient will be applied to.
        then: the weights that it was computed at.
        strength: lambda_0.
        decay: m.
        epsilon: keeps the root above zero.
    """
    square = gradient * gradient
    mean_square.lerp_(square, 1 - decay)
    gradient.addcmul_(square.div_((mean_square + epsilon).sqrt_()), now - then, value=strength)
