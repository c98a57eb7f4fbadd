"""Sums of compressed vectors, with error feedback."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from tutti.comm.base import Communicator
from tutti.reduction.base import Layout, Reduction
from tutti.replica import is_finite
from tutti.rules.compression import Codec, with_feedback


class Compressed(Reduction):
    """Every rank sends its compressed vector to all; all decompress the lot and add it up in rank order.

    A sum that is not finite leaves the errors of all ranks as they were.

    Args:
        comm: the ranks.
        layout: of the vector.
        codec: how each of them compresses.
    """

    def __init__(self, comm: Communicator, layout: Layout, codec: Codec) -> None:
        self._comm, self._codec = comm, codec
        self._error = torch.zeros(layout.length, dtype=layout.wide)
        self._gaps = layout.gaps()
        payload = codec.nbytes(layout.length, layout.wide)
        self._message = torch.zeros(comm.size, payload, dtype=torch.uint8)

    @override
    def all_reduce(self, vector: Tensor, share: float) -> int:
        self._message[self._comm.rank], error = with_feedback(self._codec, vector, self._error)
        self._comm.all_gather(self._message.view(-1))
        total = torch.zeros_like(self._error)
        for payload in self._message:
            self._codec.add(payload, total)
        for gappy in (total, error):  # a codec may have made something of their zeros
            gappy.index_fill_(0, self._gaps, 0)
        # An update by NaN or inf is left out, or ends the run: its gradients leave nothing behind.
        if is_finite(total):
            self._error = error
        vector.copy_(total)
        return (self._comm.size - 1) * self._message.shape[1]

    @override
    def forget(self) -> None:
        self._error.zero_()
