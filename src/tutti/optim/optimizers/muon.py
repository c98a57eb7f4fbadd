"""Muon: orthogonalised momentum for the matrices of hidden layers, AdamW for all other parameters."""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import _muon
from typing_extensions import override

from tutti.errors import BadModel
from tutti.optim.parameterwise import ParameterWise
from tutti.registry import part

POLYNOMIAL: Final = (_muon.DEFAULT_A, _muon.DEFAULT_B, _muon.DEFAULT_C)
"""Coefficients of Newton-Schulz, by Jordan."""


@part("muon")
class Muon(ParameterWise):
    """Momentum whose matrices are orthogonalised, with AdamW for all but the matrices of hidden layers.

        m = momentum m + (1 - momentum) g
        u = momentum m + (1 - momentum) g
        O = U V^T, approximately, where u = U S V^T: five steps of Newton-Schulz in bfloat16
        w = (1 - lr weight_decay) w - lr 0.2 sqrt(max(rows, columns)) O

    This is `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`: an update is as large as one of AdamW, so that
    both may have one rate. The weights of a convolution are a matrix of (outputs, all else).

    Made from a model, it takes every parameter of two or more dimensions for a matrix of a hidden layer,
    except in `nn.Embedding`, `nn.EmbeddingBag`, and the output layer: the last of `model.modules()` that owns
    such a parameter and is not an embedding.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks",
    https://kellerjordan.github.io/posts/muon/. The factor of the rate, and the defaults: Liu et al. 2025,
    "Muon is Scalable for LLM Training", arXiv:2502.16982, section 2.2.

    Args:
        params: the model; or matrices; or param groups, with `use_muon=False` in those of AdamW.
        lr: of Muon, from 0.
        adamw_lr: of AdamW, from 0; by default `lr`.
        weight_decay: of both, from 0.
        momentum: of Muon, 0 to below 1.
        betas: of AdamW, decay of the first and the second moment, 0 to below 1.
        eps: of AdamW, added to the root, from 0.

    Raises:
        ValueError: a value is out of range, or a parameter for Muon is no matrix.
        BadModel: the model has no matrix in a hidden layer that is trained.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.001,
        adamw_lr: float | None = None,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        other_lr = lr if adamw_lr is None else adamw_lr
        if min(lr, other_lr, weight_decay, eps) < 0 or not all(0 <= x < 1 for x in (momentum, *betas)):
            raise ValueError(
                f"lr is {lr}, adamw_lr {adamw_lr}, weight_decay {weight_decay}, momentum {momentum}, betas "
                f"{betas}, eps {eps}; expected momentum and betas from 0 to below 1 and the others from 0"
            )
        options = {"lr": lr, "adamw_lr": other_lr, "weight_decay": weight_decay, "momentum": momentum}
        groups = self.groups(params) if isinstance(params, nn.Module) else params
        super().__init__(groups, {**options, "betas": betas, "eps": eps, "use_muon": True})

    @staticmethod
    def groups(module: nn.Module) -> list[dict[str, Any]]:
        """Return the param groups for a model: Muon's, then AdamW's."""
        own = {one: list(one.parameters(recurse=False)) for one in module.modules()}
        tables = [one for one in own if isinstance(one, (nn.Embedding, nn.EmbeddingBag))]
        layers = [one for one in own if one not in tables and any(p.dim() > 1 for p in own[one])]
        apart = {parameter for one in (*tables, *layers[-1:]) for parameter in own[one]}
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for parameter in module.parameters():
            if parameter.requires_grad:
                groups[parameter.dim() > 1 and parameter not in apart].append(parameter)
        if not groups[True]:
            raise BadModel(
                f"Muon moves matrices of hidden layers, and the {type(module).__name__} trains none besides "
                "embeddings and the output layer; use --optimizer adamw"
            )
        return [{"params": parameters, "use_muon": muon} for muon, parameters in groups.items()]

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        by_adamw = param_group.get("use_muon") is False
        super().add_param_group({"lr": self.defaults["adamw_lr"]} | param_group if by_adamw else param_group)
        for parameter in () if by_adamw else self.param_groups[-1]["params"]:
            if parameter.dim() < 2:
                shape = tuple(parameter.shape)
                raise ValueError(
                    f"a parameter of shape {shape} is no matrix; make Muon from the model itself"
                )

    @override
    def cost(self, weights: Tensor, group: dict[str, Any]) -> int:
        # Some 15 products of Newton-Schulz, each with as many elements as the shorter side has.
        return weights.numel() * (1 + min(weights.flatten(1).shape) // 2 if group["use_muon"] else 1)

    @override
    def move(self, weights: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, rate = self.state[weights], float(group["lr"])
        weights.mul_(1 - rate * group["weight_decay"])
        if not group["use_muon"]:
            self._move_by_adamw(weights, gradient, group)
            return
        if not state:
            state["momentum_buffer"] = torch.zeros_like(weights)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - group["momentum"])
        matrix = gradient.lerp(momentum, group["momentum"]).flatten(1)
        update = _muon._zeropower_via_newtonschulz(matrix, POLYNOMIAL, _muon.DEFAULT_NS_STEPS, _muon.EPS)
        weights.sub_(update.view(weights.shape), alpha=rate * 0.2 * math.sqrt(max(matrix.shape)))

    def _move_by_adamw(self, weights: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[weights]
        if not state:
            state["step"] = torch.zeros(())
            state.update(exp_avg=torch.zeros_like(weights), exp_avg_sq=torch.zeros_like(weights))
        step, (beta1, beta2) = float(state["step"].add_(1)), group["betas"]
        first = state["exp_avg"].lerp_(gradient, 1 - beta1)
        second = state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        weights.addcdiv_(first, root, value=-float(group["lr"]) / (1 - beta1**step))
