"""One update by torch's fused kernels, called without the Python around them.

`Optimizer.step` spends some 60 us on hooks, checks and lists before the kernel begins: as long as the kernel
runs for 100,000 parameters. These functions read and write the optimizer's own state, in its own format, so
that either way of stepping can follow the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor, optim

State = Mapping[Tensor, Mapping[str, Tensor]]
"""An optimizer's state: for each parameter, its tensors by name."""

Kernel = Callable[[Mapping[str, Any], Sequence[Tensor], Sequence[Tensor], State], bool]
"""(param group, parameters, gradients, state) -> whether the parameters were moved.

They are not before the optimizer's own first step, which creates the state.
"""


def _adam(
    group: Mapping[str, Any], parameters: Sequence[Tensor], grads: Sequence[Tensor], state: State
) -> bool:
    states = [state[parameter] for parameter in parameters if parameter in state]
    if len(states) < len(parameters):
        return False
    steps = [s["step"] for s in states]
    torch._foreach_add_(steps, 1)
    beta1, beta2 = group["betas"]
    fused = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    fused(
        list(parameters),
        list(grads),
        [s["exp_avg"] for s in states],
        [s["exp_avg_sq"] for s in states],
        [s["max_exp_avg_sq"] for s in states] if group["amsgrad"] else [],
        steps,
        amsgrad=group["amsgrad"],
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        grad_scale=None,
        found_inf=None,
    )
    return True


def _sgd(
    group: Mapping[str, Any], parameters: Sequence[Tensor], grads: Sequence[Tensor], state: State
) -> bool:
    buffers: list[Tensor] = []
    if group["momentum"] != 0:
        buffers = [
            s["momentum_buffer"]
            for p in parameters
            if (s := state.get(p, {})).get("momentum_buffer") is not None
        ]
        if len(buffers) < len(parameters):
            return False
    torch._fused_sgd_(
        list(parameters),
        list(grads),
        buffers,
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
        grad_scale=None,
        found_inf=None,
    )
    return True


KERNELS: Final[dict[type, Kernel]] = {optim.Adam: _adam, optim.AdamW: _adam, optim.SGD: _sgd}
"""The kernels of exactly these classes: a subclass may compute something else."""
