"""A recurrent network of gated units."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from typing_extensions import override

from tutti.models.fitting import flag, share, whole_number
from tutti.models.sequences import Steps
from tutti.registry import part


@part("gru")
def gru(
    shape: tuple[int, ...],
    outputs: int,
    hidden: object = 128,
    layers: object = 1,
    bidirectional: bool = False,
    vocabulary: object = None,
    dropout: float = 0.0,
) -> nn.Module:
    """Build gated recurrent units over a sequence, and one dense layer on the last state.

    A layer of H units over F features has 3 (H F + H H + 2 H) parameters in each direction: two biases, as
    cuDNN and torch have them. Initialised by torch's defaults.

    Cho et al. 2014, "Learning Phrase Representations using RNN Encoder-Decoder for Statistical Machine
    Translation", section 2.3; the reset gate is applied behind the recurrent product, as in torch.

    Args:
        shape: of one input: (length,) of numbers, or of tokens if there is a vocabulary; (length, features);
            or (channels, height, width) of an image, whose rows are the steps. Sequences of unequal length
            are read to the end of each.
        outputs: size of the last layer.
        hidden: how many units each layer has, in each direction.
        layers: how many there are, one above the other.
        bidirectional: whether each also reads from the end to the beginning.
        vocabulary: how many tokens there are; each becomes a vector of `hidden` numbers.
        dropout: probability with which each output of a layer is dropped in training.

    Raises:
        BadModel: the inputs are no sequences.
        BadOption: an option's value cannot be used.
    """
    size, depth = whole_number("hidden", hidden), whole_number("layers", layers)
    both, dropped = flag("bidirectional", bidirectional), share("dropout", dropout)
    return Recurrent(Steps("gru", shape, vocabulary, size), size, depth, both, dropped, outputs)


class Recurrent(nn.Module):
    """Layers of gated recurrent units, and a dense one on the last state."""

    def __init__(
        self, steps: Steps, hidden: int, layers: int, bidirectional: bool, dropout: float, outputs: int
    ) -> None:
        super().__init__()
        width = hidden * (2 if bidirectional else 1)
        sizes = [steps.features] + [width] * (layers - 1)
        self.steps = steps
        self.layers = nn.ModuleList(
            nn.GRU(size, hidden, batch_first=True, bidirectional=bidirectional) for size in sizes
        )
        # Not by `nn.GRU`, whose dropout depends on which rank computes a sample.
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.output = nn.Linear(width, outputs)

    @override
    def forward(self, inputs: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return the outputs, of shape (n, outputs) without the padding behind `lengths`, of shape (n,)."""
        states: Tensor = self.steps(inputs)
        last = states[:, 0]
        for number, layer in enumerate(self.layers):
            states, last = _read(layer, self.dropout(states) if number else states, lengths)
        outputs: Tensor = self.output(self.dropout(last))
        return outputs


def _read(layer: nn.Module, vectors: Tensor, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the states of a layer at all steps, of shape (n, length, width), and the last, (n, width)."""
    if lengths is None:
        states, last = layer(vectors)
    else:
        # An empty sequence is read as one step of padding.
        known = lengths.clamp(min=1).cpu()
        packed, last = layer(pack_padded_sequence(vectors, known, batch_first=True, enforce_sorted=False))
        states, _ = pad_packed_sequence(packed, batch_first=True, total_length=vectors.shape[1])
    return states, last.transpose(0, 1).flatten(1)
