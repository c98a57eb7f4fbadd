"""A small transformer encoder."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from tutti.errors import BadOption
from tutti.models.fitting import share, whole_number
from tutti.models.sequences import Steps, is_there
from tutti.registry import part


@part("transformer")
def transformer(
    shape: tuple[int, ...],
    outputs: int,
    width: object = 128,
    heads: object = 4,
    layers: object = 2,
    hidden: object = "auto",
    vocabulary: object = None,
    dropout: float = 0.1,
) -> nn.Module:
    """Build a transformer encoder over a sequence, and one dense layer on the mean of its steps.

    A layer of width W with H hidden units has 4 W W + 2 W H + 9 W + H parameters: the 3,152,384 of a layer
    of the paper's base model (512 wide, 2048 hidden), the 7,087,872 of one of BERT's.

    Vaswani et al. 2017, "Attention Is All You Need", sections 3.1 to 3.5 and 5.4: sinusoidal positions, ReLU,
    dropout on the positions and behind each sublayer. The norm stands before each sublayer, which needs no
    warm-up of the learning rate: Xiong et al. 2020, "On Layer Normalization in the Transformer
    Architecture". Matrices are initialised as Glorot and Bengio have them, biases by 0.

    Args:
        shape: of one input: (length,) of numbers, or of tokens if there is a vocabulary; (length, features);
            or (channels, height, width) of an image, whose rows are the steps. In sequences of unequal length
            padding is not looked at.
        outputs: size of the last layer.
        width: of the vectors of the steps; an even multiple of `heads`.
        heads: of each attention.
        layers: how many there are.
        hidden: units between the two dense layers of each step; "auto": four times the width.
        vocabulary: how many tokens there are.
        dropout: probability with which numbers are dropped in training.

    Raises:
        BadModel: the inputs are no sequences.
        BadOption: an option's value cannot be used.
    """
    size, count = whole_number("width", width), whole_number("heads", heads)
    if size % count or size % 2:
        raise BadOption(f"option 'width' is {size}; give an even multiple of the {count} heads, such as 128")
    inner = 4 * size if hidden == "auto" else whole_number("hidden", hidden)
    dropped, depth = share("dropout", dropout), whole_number("layers", layers)
    blocks = [EncoderLayer(size, count, inner, dropped) for _ in range(depth)]
    return TransformerEncoder(Steps("transformer", shape, vocabulary, size), size, blocks, dropped, outputs)


class TransformerEncoder(nn.Module):
    """Layers of self-attention over a sequence, and a dense one on the mean of its steps."""

    def __init__(
        self, steps: Steps, width: int, layers: list[EncoderLayer], dropout: float, outputs: int
    ) -> None:
        super().__init__()
        self.steps, self.width = steps, width
        self.project = nn.Identity() if steps.tokens is not None else nn.Linear(steps.features, width)
        self.dropout = nn.Dropout(dropout)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, outputs)
        for layer in self.modules():
            if isinstance(layer, nn.Linear):
                nn.init.xavier_uniform_(layer.weight)
                nn.init.zeros_(layer.bias)
        if steps.tokens is not None:
            # `forward` multiplies by the root of the width, as in section 3.4.
            nn.init.normal_(steps.tokens.weight, std=width**-0.5)

    @override
    def forward(self, inputs: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the outputs, of shape (n, outputs) without the padding behind `lengths`, of shape (n,)."""
        vectors: Tensor = self.project(self.steps(inputs))
        if self.steps.tokens is not None:
            vectors = vectors * math.sqrt(self.width)
        vectors = self.dropout(vectors + positions(vectors))
        there = None if lengths is None else is_there(vectors, lengths)
        for layer in self.layers:
            vectors = layer(vectors, there)
        vectors = self.norm(vectors)
        if there is None:
            mean = vectors.mean(dim=1)
        else:
            mean = (vectors * there.unsqueeze(2)).sum(dim=1) / there.sum(dim=1, keepdim=True)
        outputs: Tensor = self.output(mean)
        return outputs


class EncoderLayer(nn.Module):
    """Self-attention and two dense layers, each added to its inputs."""

    def __init__(self, width: int, heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.dense_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries, self.keys = nn.Linear(width, width), nn.Linear(width, width)
        self.values, self.join = nn.Linear(width, width), nn.Linear(width, width)
        self.dense = nn.Sequential(nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
        self.attention_dropout, self.dense_dropout = nn.Dropout(dropout), nn.Dropout(dropout)

    @override
    def forward(self, vectors: Tensor, there: Tensor | None) -> Tensor:
        """Return the vectors behind both sublayers, of shape (n, length, width).

        `there`, of shape (n, length), marks the steps that belong to their sequence; None: all.
        """
        vectors = vectors + self.attention_dropout(self._attend(self.attention_norm(vectors), there))
        outputs: Tensor = vectors + self.dense_dropout(self.dense(self.dense_norm(vectors)))
        return outputs

    def _attend(self, vectors: Tensor, there: Tensor | None) -> Tensor:
        # Of shape (n, heads, length, width / heads).
        queries, keys, values = (
            made(vectors).unflatten(2, (self.heads, -1)).transpose(1, 2)
            for made in (self.queries, self.keys, self.values)
        )
        mask = None if there is None else there[:, None, None, :]
        attended = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        joined: Tensor = self.join(attended.transpose(1, 2).flatten(2))
        return joined


def positions(vectors: Tensor) -> Tensor:
    """Return the sinusoids of each step, of shape (length, width): section 3.5."""
    _, length, width = vectors.shape
    # In 16 bits the step numbers beyond 256 are not exact.
    precise = torch.promote_types(vectors.dtype, torch.float32)
    steps = torch.arange(length, dtype=precise, device=vectors.device)
    even = torch.arange(0, width, 2, dtype=precise, device=vectors.device)
    angles = steps.unsqueeze(1) * torch.exp(even * (-math.log(10_000.0) / width))
    return torch.stack((angles.sin(), angles.cos()), dim=2).flatten(1).to(vectors.dtype)
