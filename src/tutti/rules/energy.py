"""Gradient energy matching: the share of its update that a worker may commit.

Hermans, Louppe 2018, "Gradient Energy Matching for Distributed Asynchronous Gradient Descent",
arXiv:1805.08469, algorithm 1.
"""

from __future__ import annotations

from torch import Tensor


def match_energy(
    update: Tensor,
    moment: Tensor,
    centre: Tensor,
    then: Tensor,
    *,
    momentum: float,
    amplification: float = 1.0,
    least: float = 0.0,
    most: float = 5.0,
    epsilon: float = 1e-16,
) -> None:
    """Scale an update so that it, and what others did meanwhile, move the centre as SGD with momentum would.

        m  = mu m + dw
        pi = (kappa |m| - |w - s|) / (|dw| + epsilon),  limited to least .. most
        dw = pi * dw                                                     (all elementwise)

    The kinetic energy of a move is half its square. |m| is what the proxy, SGD with momentum, would have
    moved; |w - s| is what the centre has moved since the worker read it, by all workers; what is left of the
    proxy's energy is the update's own. `amplification` is that of appendix B, equation 27. The limits are not
    in the algorithm's text; the authors' own program has them, 0 and 5, "for numerical stability".

    Args:
        update: dw = -eta * gradient; overwritten with what to commit.
        moment: m, updated in place; zeros at first.
        centre: w, the centre's weights now.
        then: s, the centre's weights from which the gradient was computed.
        momentum: mu.
        amplification: kappa.
        least: the smallest scale; below 0, an update may be turned round.
        most: the largest scale.
        epsilon: keeps the division from 0.
    """
    moment.mul_(momentum).add_(update)
    room = moment.abs().mul_(amplification).sub_((centre - then).abs_())
    # An epsilon of 1e-16 is lost beside any larger number in fp32; it counts beside zero alone.
    scale = room.div_(update.abs().add_(epsilon)).clamp_(least, most)
    update.mul_(scale)
