"""An optimizer of somebody else's, which keeps all kinds of things."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim import Optimizer


class Odd(Optimizer):
    """Averages the last three gradients, and scales all by what the whole model and its past are like."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr, "calls": 0, "scale": None, "window": (3, "latest")})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        whole = self.state.setdefault("whole", {"norms": [], "longest": torch.zeros(())})
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = sum(float(gradient.square().sum()) for gradient in gradients) ** 0.5
        whole["norms"] = [*whole["norms"][-1:], norm]
        whole["longest"] = torch.maximum(whole["longest"], torch.tensor(norm))
        for group in self.param_groups:
            group["calls"] += 1
            group["scale"] = torch.tensor(1 / (group["calls"] + max(whole["norms"])))
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(latest=[], seen={"steps": 0, "signs": [None, True]}, label="new")
                state["latest"] = [*state["latest"], parameter.grad.clone()][-group["window"][0] :]
                state["seen"]["steps"] += 1
                state["label"] = "old" if state["seen"]["steps"] > 2 else "new"
                damped = 0.5 if state["label"] == "old" else 1.0
                total = sum(state["latest"]) / (len(state["latest"]) * float(whole["longest"]))
                parameter.sub_(total, alpha=group["lr"] * damped * float(1 + group["scale"]))
