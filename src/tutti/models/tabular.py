"""An ensemble of perceptrons for tables, trained as one model."""

from __future__ import annotations

import math
from itertools import pairwise
from math import prod

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from tutti.models.embedding import EmbeddedTable
from tutti.models.fitting import share, whole_number, whole_numbers
from tutti.records.preparation import TableInputs
from tutti.registry import part

DEFAULTS = {
    "optimizer": "adamw",
    "optimizer_options": {"weight_decay": 0.1},
    "lr": 0.006,
    "schedule": "cosine",
    "batch_size": 64,
}
"""Its default training options."""

DEVIATION = 0.1
"""The deviation of the frequencies before training."""

FREQUENCIES = 16
"""The number of cosines of each number."""

SUMS = 3
"""The number of sums of these cosines."""


@part("tabular")
def tabular(
    shape: tuple[int, ...],
    outputs: int,
    table: TableInputs | None,
    hidden: object = (128, 128),
    members: object = 16,
    dropout: float = 0.2,
    embed: object = "auto",
) -> nn.Module:
    """Build an ensemble of perceptrons over the columns of a table, which share their hidden layers.

        number      x, and A cos(2 pi f x + p) + c, where each column has its own f, p, A and c
        text        a vector, as in `EmbeddedTable`
        member m    h_m = r_m * columns; h_m <- dropout(relu(W h_m + b)) in each layer; y_m = V_m h_m + v_m
        output      the mean of all y_m; in training each member has its own loss

    Gorishniy et al. 2024, "TabM: Advancing Tabular Deep Learning with Parameter-Efficient Ensembling",
    section 3.3, TabM-mini: each r begins as -1 or 1 by chance. Here members drop the same numbers of a
    sample, which saves half of the time. The cosines are PBLD of Holzmüller et al. 2024, "Better by Default:
    Strong Pre-Tuned MLPs and Boosted Trees on Tabular Data", section 3.

    Args:
        shape: of one input; any. Without a prepared table all inputs are numbers, best of deviation 1.
        outputs: of each member.
        table: the inputs of a prepared table; None: the data are none.
        hidden: sizes of the layers before the last.
        members: how many perceptrons.
        dropout: probability with which each of these layers' outputs is dropped in training.
        embed: width of the vectors of texts with more than 30 values; "auto": see `EmbeddedTable`.

    Raises:
        BadOption: a size or a probability that cannot be used.
    """
    sizes, count = whole_numbers("hidden", hidden), whole_number("members", members)
    vectors = EmbeddedTable(table or TableInputs(prod(shape), 0), embed)
    return Tabular(vectors, sizes, count, share("dropout", dropout), outputs)


class Tabular(nn.Module):
    """The ensemble."""

    def __init__(
        self, vectors: EmbeddedTable, hidden: list[int], members: int, dropout: float, outputs: int
    ) -> None:
        super().__init__()
        numbers = vectors.table.numbers
        self.vectors = vectors
        self.periodic = Periodic(numbers) if numbers else nn.Identity()
        sizes = [vectors.width + SUMS * numbers, *hidden]
        self.signs = nn.Parameter(2.0 * torch.randint(0, 2, (members, sizes[0])) - 1)
        self.layers = nn.ModuleList(nn.Linear(size, width) for size, width in pairwise(sizes))
        self.dropout = nn.Dropout(dropout)
        self.weight = nn.Parameter(_drawn(sizes[-1], members, sizes[-1], outputs))
        self.bias = nn.Parameter(_drawn(sizes[-1], members, 1, outputs))

    @override
    def forward(self, inputs: Tensor) -> Tensor | dict[str, object]:
        """Return the outputs, of shape (n, outputs); in training as "logits", beside those of the "members".

        Args:
            inputs: of shape (n, ...).
        """
        columns = self.periodic(self.vectors(inputs.flatten(1)))
        # Of shape (members, n, width).
        hidden = columns * self.signs.unsqueeze(1)
        for layer in self.layers:
            hidden = functional.relu(layer(hidden))
            hidden = hidden * self.dropout(torch.ones_like(hidden[0]))
        each = torch.baddbmm(self.bias, hidden, self.weight)
        return {"logits": each.mean(0), "members": each.unbind()} if self.training else each.mean(0)


class Periodic(nn.Module):
    """Adds sums of cosines of the numbers, which are the first columns."""

    def __init__(self, numbers: int) -> None:
        super().__init__()
        self.frequencies = nn.Parameter(DEVIATION * torch.randn(numbers, FREQUENCIES))
        self.phases = nn.Parameter(math.pi * _drawn(1, numbers, FREQUENCIES))
        self.weight = nn.Parameter(_drawn(FREQUENCIES, numbers, FREQUENCIES, SUMS))
        self.bias = nn.Parameter(_drawn(FREQUENCIES, numbers, SUMS))

    @override
    def forward(self, columns: Tensor) -> Tensor:
        """Return the columns, then the sums of each number, of shape (n, columns + numbers * SUMS)."""
        numbers = columns[:, : len(self.bias), None]
        cosines = torch.cos(2 * math.pi * self.frequencies * numbers + self.phases)
        sums = torch.einsum("ncf,cfs->ncs", cosines, self.weight) + self.bias
        return torch.cat([columns, sums.flatten(1)], 1)


def _drawn(width: int, *shape: int) -> Tensor:
    """Draw weights for `width` inputs as torch's Linear does."""
    return torch.empty(shape).uniform_(-(width**-0.5), width**-0.5)
