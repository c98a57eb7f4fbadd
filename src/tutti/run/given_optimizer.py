"""An optimizer that the caller has built over the model, as something that builds it again on the ranks."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from tutti.errors import BadOption
from tutti.load_object import takes_option


class OptimizerAgain:
    """Builds an optimizer like the caller's over the parameters of a copy of the model.

    Args:
        optimizer: over parameters of `model`; it has made no step.
        model: the caller's module.

    Raises:
        BadOption: `model` is none, the optimizer has other parameters than it, or has made steps.
    """

    def __init__(self, optimizer: Optimizer, model: object) -> None:
        self._kind, self.__qualname__ = type(optimizer), type(optimizer).__name__
        if not isinstance(model, nn.Module):
            raise BadOption(
                "the optimizer is built already, but the model is not; give the model as a module, or the "
                "optimizer's class, its name, or a function that makes it from the parameters"
            )
        if optimizer.state:
            raise BadOption(
                "the optimizer has made steps already, and what it knows of them would be lost; give a new "
                "one"
            )
        own = [parameter for parameter in model.parameters() if parameter.requires_grad]
        places = {parameter: place for place, parameter in enumerate(own)}
        self._groups: list[tuple[list[int], dict[str, Any]]] = []
        for group in optimizer.param_groups:
            if not all(parameter in places for parameter in group["params"]):
                raise BadOption(
                    f"the optimizer {self.__qualname__} has parameters that are not trainable ones of the "
                    "model; build it over those of the model that is given"
                )
            options = {name: value for name, value in group.items() if name != "params"}
            self._groups.append(([places[parameter] for parameter in group["params"]], options))
        self._options = {
            name: value for name, value in optimizer.defaults.items() if takes_option(self._kind, name)
        }

    def __call__(self, parameters: list[nn.Parameter]) -> Optimizer:
        """Build it over the model's trainable parameters."""
        groups = [
            {"params": [parameters[place] for place in places], **options} for places, options in self._groups
        ]
        make: Any = self._kind
        made: Optimizer = make(groups, **self._options)
        return made
