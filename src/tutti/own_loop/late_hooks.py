"""The program's hooks on a parameter's gradient, called when that is the gradient of all ranks.

torch calls hooks while `backward()` goes on, when a rank has only its own part of the gradient. So it
finds ours in their place, and the program's are called at the end of `backward()`, after the exchange:

    register_hook                        with what this pass has brought, which they may replace
    register_post_accumulate_grad_hook   with the parameter, whose gradient is added up

Where `torch.autograd.grad` asks for a parameter's gradient nothing is exchanged, and hooks see this rank's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from typing_extensions import override

from tutti.errors import BadOption

Hook = Callable[[Any], Any]
"""A function that either of the two methods registers."""

OURS: Final = -1
"""The key of our own hook; torch's count from 0."""


class HookRegistry(OrderedDict[int, Hook]):
    """The hooks of one kind on a parameter, of which torch calls only ours.

    Args:
        known: those that are registered already. What takes them out again holds this very dictionary.
        ours: is called once there are others.

    Attributes:
        others: the program's.
    """

    def __init__(self, known: dict[int, Hook] | None, ours: Hook) -> None:
        super().__init__()
        self._ours = ours
        self.others: dict[int, Hook] = OrderedDict() if known is None else known
        if self.others:
            self.call_ours()

    def call_ours(self) -> None:
        """Have torch call ours from now on."""
        super().__setitem__(OURS, self._ours)

    @override
    def __setitem__(self, key: int, hook: Hook) -> None:
        self.others[key] = hook
        self.call_ours()

    @override
    def __contains__(self, key: object) -> bool:
        return key in self.others

    @override
    def __delitem__(self, key: int) -> None:
        del self.others[key]


class LateHooks:
    """All of the program's hooks on the gradient of one parameter.

    Args:
        parameter: it.
        arrived: is called whenever something has been added to its gradient.
    """

    def __init__(self, parameter: nn.Parameter, arrived: Callable[[Tensor], None]) -> None:
        self._parameter = parameter
        self._on_gradient = HookRegistry(parameter._backward_hooks, self._see)
        self._behind = HookRegistry(getattr(parameter, "_post_accumulate_grad_hooks", None), arrived)
        self._behind.call_ours()
        parameter._backward_hooks = self._on_gradient
        parameter._post_accumulate_grad_hooks = self._behind
        self._noted = False
        self._before: Tensor | None = None

    def __bool__(self) -> bool:
        return self._noted or bool(self._on_gradient.others or self._behind.others)

    @property
    def adding(self) -> bool:
        """True if the hooks are to see what a pass has added to a gradient that was there before."""
        return self._noted and self._before is not None

    def note(self) -> None:
        """Note the gradient that is there before a pass adds to it."""
        gradient = self._parameter.grad
        if self._on_gradient.others and (gradient is None or not self._noted):
            self._noted = True
            self._before = None if gradient is None else gradient.clone()

    def call(self) -> None:
        """Call them with the gradient of all ranks, which is in its place."""
        gradient = self._parameter.grad
        if self._noted and gradient is not None:
            before = self._before
            new = self._through(gradient.clone() if before is None else gradient - before)
            gradient.copy_(new if before is None else before + new)
        self._noted, self._before = False, None
        for hook in list(self._behind.others.values()):
            hook(self._parameter)

    def _see(self, gradient: Tensor | None) -> Tensor | None:
        """Torch's call with what comes to the parameter; None where a part of the graph has not been used."""
        if gradient is None:
            return None
        if self._is_asked_for():
            return self._through(gradient)
        self.note()
        return None

    def _is_asked_for(self) -> bool:
        """Return whether the gradient goes to a caller of `torch.autograd.grad`, and is not accumulated."""
        try:
            torch._C._will_engine_execute_node(adder(self._parameter))
        except RuntimeError:  # that is how torch says so
            return True
        return False

    def _through(self, gradient: Tensor) -> Tensor:
        for hook in list(self._on_gradient.others.values()):
            given = hook(gradient)
            if given is None:
                continue
            if given.shape != gradient.shape:
                raise BadOption(
                    f"a hook of register_hook made a tensor of shape {tuple(given.shape)} of a gradient of "
                    f"shape {tuple(gradient.shape)}; the shape must stay"
                )
            gradient = given
        return gradient


def adder(parameter: nn.Parameter) -> Any:
    """The autograd node that accumulates a parameter's gradient; it and its hooks live while referred to."""
    trained = parameter.requires_grad
    # The loop may evaluate in inference mode now, or call the model inside of `torch.func.grad`.
    with torch.inference_mode(False), torch.enable_grad(), temporarily_clear_interpreter_stack():
        parameter.requires_grad_(True)
        found = parameter.view_as(parameter).grad_fn
        parameter.requires_grad_(trained)
    assert found is not None, "it is a function of a parameter that is trained"
    return found.next_functions[0][0]
