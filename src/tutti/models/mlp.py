"""The multilayer perceptron."""

from __future__ import annotations

from math import prod

from torch import nn
from torch.nn.modules import activation as activations

from tutti.errors import UnknownName
from tutti.models.embedding import EmbeddedTable
from tutti.models.fitting import share, whole_numbers
from tutti.records.preparation import TableInputs
from tutti.registry import part

OTHERS = {"GLU", "LogSoftmax", "MultiheadAttention", "Softmax", "Softmax2d", "Softmin", "Threshold"}
"""Classes among torch's activations that map several numbers at once, or need options."""

ACTIVATIONS: dict[str, type[nn.Module]] = {
    name.lower(): getattr(activations, name) for name in activations.__all__ if name not in OTHERS
}
"""torch's activations by lower-case name."""


@part("mlp")
def mlp(
    shape: tuple[int, ...],
    outputs: int,
    table: TableInputs | None,
    hidden: object = (256, 128),
    activation: str = "relu",
    dropout: float = 0.0,
    embed: object = "auto",
) -> nn.Module:
    """Build fully connected layers over the flattened input.

    Args:
        shape: of one input; any.
        outputs: size of the last layer.
        table: the inputs of a prepared table; None: the data are none.
        hidden: sizes of the layers before it; an empty list leaves a linear model.
        activation: after each of them: relu, sigmoid, tanh, gelu, or another of `torch.nn`'s.
        dropout: probability with which each of their outputs is dropped in training.
        embed: width of the vectors of a table's texts with more than 30 values; "auto": see `EmbeddedTable`.

    Raises:
        BadOption: a size or a probability that cannot be used.
        UnknownName: there is no such activation.
    """
    if str(activation).lower() not in ACTIVATIONS:
        raise UnknownName("value", str(activation), ACTIVATIONS, of="the option 'activation'")
    dropped = share("dropout", dropout)
    layers: list[nn.Module] = [nn.Flatten()]
    width = prod(shape)
    if table is not None and table.categories:
        layers = [vectors := EmbeddedTable(table, embed)]
        width = vectors.width
    for size in whole_numbers("hidden", hidden):
        layers += [nn.Linear(width, size), ACTIVATIONS[str(activation).lower()]()]
        if dropped:
            layers.append(nn.Dropout(dropped))
        width = size
    return nn.Sequential(*layers, nn.Linear(width, outputs))
