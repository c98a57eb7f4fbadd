"""Losses of shares of classes, as samples have them that were mixed."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tutti.errors import BadOption
from tutti.training.losses import Loss


def refuse_without_shares(loss: Loss, shares: Tensor) -> None:
    """Refuse a loss that does not take shares of classes for what they are.

    It does if the gradient for equal shares of two classes is the mean of those for the two.

    Args:
        loss: of the run.
        shares: of a few samples, of shape (samples, classes, ...).

    Raises:
        BadOption: it needs class numbers, has a denominator of its own, or takes shares for something else.
    """
    reason = loss.floats(shares) if loss.floats else None
    if loss.weighed or loss.ignored is not None:
        reason = "divides by the weights of labels, of which shares have none"
    elif reason is None and not loss.whole:
        reason = _of_gradients(loss, shares)
    if reason is not None:
        raise BadOption(
            f"mixed samples have shares of classes, and loss '{loss.name}' {reason}; use the loss "
            "'cross_entropy', or leave --augment mixup out"
        )


def _of_gradients(loss: Loss, shares: Tensor) -> str | None:
    outputs = torch.randn(shares.shape, generator=torch.Generator().manual_seed(0)).to(shares)
    samples, classes, *rest = shares.shape
    labels = [torch.full((samples, *rest), label, device=shares.device) for label in range(2)]
    halves = sum(functional.one_hot(one, classes).movedim(-1, 1).to(shares) / 2 for one in labels)
    assert isinstance(halves, Tensor)
    try:
        mixed, *alone = (_gradient(loss, outputs, one) for one in (halves, *labels))
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        return f"fails with them ({type(error).__name__}: {error})"
    expected = torch.stack(alone).mean(0)
    close = torch.allclose(mixed, expected, rtol=1e-3, atol=1e-5 * float(expected.abs().max()))
    return None if close else "takes them for something else"


def _gradient(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    with torch.enable_grad():
        given = outputs.clone().requires_grad_()
        (found,) = torch.autograd.grad(loss(given, targets), given)
    return found
