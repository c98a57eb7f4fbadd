"""The texts of a prepared table as vectors, which models learn."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from tutti.models.fitting import whole_number
from tutti.records.preparation import TableInputs

DEVIATION = 0.01
"""The deviation of vectors before training, as in fastai: a text unseen in training adds almost nothing."""


class EmbeddedTable(nn.Module):
    """The columns of a table, with a vector in place of each category number.

    Guo and Berkhahn 2016, "Entity Embeddings of Categorical Variables", section 3. The width for c categories
    is fastai's `emb_sz_rule`, min(600, round(1.6 c^0.56)), unless `embed` is a number.
    """

    def __init__(self, table: TableInputs, embed: object = "auto") -> None:
        super().__init__()
        self.table = table
        size = None if embed == "auto" else whole_number("embed", embed)
        self.embeddings = nn.ModuleList(
            nn.Embedding(count, size or min(600, round(1.6 * count**0.56))) for count in table.categories
        )
        self.width = table.numbers + table.flags
        for embedding in self.embeddings:
            assert isinstance(embedding, nn.Embedding)
            nn.init.trunc_normal_(embedding.weight, std=DEVIATION)
            self.width += embedding.embedding_dim

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        """Return numbers, flags and vectors, of shape (n, width), of inputs of shape (n, columns)."""
        if not self.embeddings:
            return inputs
        known = self.table.numbers + self.table.flags
        categories = inputs[:, known:].long().unbind(1)
        vectors = [embedding(one) for embedding, one in zip(self.embeddings, categories, strict=True)]
        return torch.cat([inputs[:, :known], *vectors], 1)
