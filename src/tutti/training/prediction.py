"""The outputs of a model for the samples of a part, over all ranks: each sample once, in order.

    pass      0     │ 1     │ 2     │ 3     │ 4     │ 5   │      the same samples at any number of ranks
    ranks     r0    │ r0    │ r0    │ r1    │ r1    │ r1  │      go to rank 0

The other samples of a pass may change an output by rounding; passes do not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor, nn

from tutti.comm.base import Communicator, cut
from tutti.data.columns import Inputs
from tutti.data.parts import Part
from tutti.data.targets import NO_LABEL
from tutti.records.predictions import Predictions
from tutti.training.evaluation import evaluating
from tutti.training.precision import Arithmetic

PASS: Final = 250
"""The samples of one forward pass."""


def predict(module: nn.Module, part: Part, comm: Communicator, arithmetic: Arithmetic) -> Tensor | None:
    """Compute the outputs for every sample of a part by ranks with the same weights (collective).

    Return, on rank 0, the outputs, of shape (samples, ...), in the order of the part; None on the others.
    """
    whole = SampleBlock(
        len(part), lambda start, stop: part.take(torch.arange(start, stop, device=part.device))[0]
    )
    return outputs_of(module, whole, comm, arithmetic)


@dataclass(frozen=True)
class SampleBlock:
    """Samples to predict before the next ones are read."""

    samples: int  # a multiple of `PASS`, except in the last block
    take: Callable[[int, int], Inputs]  # (start, stop) -> the model's inputs


def outputs_of(
    module: nn.Module, block: SampleBlock, comm: Communicator, arithmetic: Arithmetic
) -> Tensor | None:
    """Compute the outputs for every sample of a block that all ranks see (collective); see `predict`.

    All ranks make the same number of passes, as in `tutti.training.evaluation.evaluate`.
    """
    shares = cut(-(-block.samples // PASS), comm.size)
    mine, longest = shares[comm.rank], shares[0]
    found: list[Tensor] = []
    # No collective inside: virtual ranks share the gradient mode and autocast of their thread.
    with evaluating(module), torch.no_grad():
        for number in range(mine.start, mine.start + longest.stop):
            comm.note_progress()
            counts = number < mine.stop
            start, stop = (number * PASS, min((number + 1) * PASS, block.samples)) if counts else (0, 1)
            outputs = arithmetic.forward(module, arithmetic.inputs(block.take(start, stop)))
            if counts:
                found.append(outputs.cpu())
    if comm.rank:
        for outputs in found:
            comm.send(outputs.reshape(-1), 0)
        return None
    for rank, share in enumerate(shares[1:], start=1):
        for number in range(share.start, share.stop):
            count = min(PASS, block.samples - number * PASS)
            outputs = found[0].new_empty(count, *found[0].shape[1:])
            comm.recv(outputs.view(-1), rank)
            found.append(outputs)
    return torch.cat(found)


def predictions_of(part: Part, outputs: Tensor, ignored: int | None = None) -> Predictions:
    """Return the outputs for a part with the samples' numbers in the source and their targets.

    `NO_LABEL` replaces the label `ignored`.
    """
    rows = torch.arange(len(part)) if part.rows is None else part.rows
    targets = part.targets
    if ignored not in (None, NO_LABEL):
        targets = targets.long().masked_fill(targets == ignored, NO_LABEL)
    return Predictions(*(np.asarray(one.cpu()) for one in (rows, outputs, targets)))
