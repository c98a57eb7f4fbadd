"""Sequences of vectors, the input of the built-in sequence models, from tokens, numbers or images."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, nn
from typing_extensions import override

from tutti.errors import BadModel
from tutti.models.fitting import whole_number


class Steps(nn.Module):
    """The first layer of a model for sequences: it makes each step of a sequence a vector.

    Inputs have shape (length,), of numbers or of tokens if there is a vocabulary; (length, features); or
    (channels, height, width) of an image, whose rows are the steps. `model` is a name for messages, `width`
    the length of the vectors of tokens, `features` the length of the vectors.
    """

    def __init__(self, model: str, shape: tuple[int, ...], vocabulary: object, width: int) -> None:
        super().__init__()
        if not 1 <= len(shape) <= 3 or (vocabulary is not None and len(shape) != 1):
            wanted = "(length,), (length, features) or (channels, height, width)"
            raise BadModel(
                f"model '{model}' takes inputs of shape {wanted if vocabulary is None else '(length,)'}"
                f"{'' if vocabulary is None else ' where it has a vocabulary'}, but the data's have shape "
                f"{tuple(shape)}"
            )
        self.model = model
        self.tokens: nn.Embedding | None = None
        if vocabulary is not None:
            self.tokens, self.features = nn.Embedding(whole_number("vocabulary", vocabulary), width), width
        else:
            self.features = prod(shape) // shape[-2] if len(shape) > 1 else 1

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        """Return the vectors, of shape (n, length, features); raise BadModel for wrong numbers or tokens."""
        if self.tokens is not None:
            return self._embedded(inputs, self.tokens)
        if not inputs.is_floating_point():
            raise BadModel(
                f"model '{self.model}' has whole numbers as inputs; if they are tokens, say how many there "
                "are: --model.vocabulary N; else make them floats"
            )
        if inputs.dim() == 4:
            return inputs.transpose(1, 2).flatten(2)
        return inputs if inputs.dim() == 3 else inputs.unsqueeze(2)

    def _embedded(self, inputs: Tensor, tokens: nn.Embedding) -> Tensor:
        if inputs.is_floating_point():
            raise BadModel(
                f"model '{self.model}' has a vocabulary, but the inputs are no whole numbers; leave "
                "--model.vocabulary out, or store the tokens as integers of 16 bits or more"
            )
        try:
            vectors: Tensor = tokens(inputs)
        except IndexError as error:
            raise BadModel(
                f"model '{self.model}' has a vocabulary of {tokens.num_embeddings}, so tokens are 0 to "
                f"{tokens.num_embeddings - 1}, but the inputs have {inputs.min()} to {inputs.max()}; give "
                "a larger --model.vocabulary"
            ) from error
        return vectors


def is_there(steps: Tensor, lengths: Tensor) -> Tensor:
    """Return which steps belong to their sequence and are no padding, of shape (n, longest).

    An empty sequence has its first step.
    """
    return torch.arange(steps.shape[1], device=steps.device) < lengths.to(steps.device).clamp(
        min=1
    ).unsqueeze(1)
