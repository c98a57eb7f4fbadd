"""Elastic averaging: a worker and the centre pull at each other.

Zhang, Choromanska, LeCun 2015, "Deep learning with Elastic Averaging SGD", arXiv:1412.6651.
"""

from __future__ import annotations

from torch import Tensor


def attract(worker: Tensor, centre: Tensor, rate: float) -> None:
    """Move a worker's weights and the centre's towards each other, both in place.

        d = rate * (x - c)        x = x - d        c = c + d

    Source: algorithm 1, steps a and b; `rate` is the paper's alpha.

    Args:
        worker: x, of any shape.
        centre: c, of the same shape and dtype.
        rate: which share of their distance each of them goes; 0.5 makes them meet in the middle.
    """
    distance = worker - centre
    worker.sub_(distance, alpha=rate)
    centre.add_(distance, alpha=rate)


def gather(centre: Tensor, total: Tensor, workers: int, force: float) -> None:
    """Move the centre towards the mean of all workers, in place.

        c = (1 - beta) c + beta * (1/p) * sum of x_i

    Source: equation 4; `force` is the paper's beta = p * alpha.

    Args:
        centre: c.
        total: the sum of the workers' weights, before they are moved themselves. It is overwritten.
        workers: p.
        force: beta.
    """
    centre.lerp_(total.div_(workers), force)


def nesterov(position: Tensor, velocity: Tensor, gradient: Tensor, lr: float, momentum: float) -> None:
    """Step by Nesterov's momentum, in the variable that the gradient is computed at, in place.

        v' = delta v - eta g(x + delta v)        x' = x + v'

    Source: algorithm 2 (EAMSGD). With y = x + delta v, where the gradient is wanted, the same step is

        v' = delta v - eta g(y)                  y' = y - eta g(y) + delta v'

    Args:
        position: y, overwritten with y'.
        velocity: v, overwritten with v'.
        gradient: g(y).
        lr: eta.
        momentum: delta.
    """
    velocity.mul_(momentum).sub_(gradient, alpha=lr)
    position.sub_(gradient, alpha=lr).add_(velocity, alpha=momentum)
