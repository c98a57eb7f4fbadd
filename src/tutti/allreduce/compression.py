"""Sums of compressed gradients, with error feedback.

A codec is lossy. Error feedback keeps what was lost and adds it to the next gradient (see `with_feedback`).

| codec    | bytes for n numbers of 32 bits  | what arrives                                            |
|----------|---------------------------------|---------------------------------------------------------|
| `Cast`   | 2 n                             | the nearest 16-bit number                               |
| `Int8`   | n + 4 for each bucket           | the nearest of 255 levels between -max and max          |
| `TopK`   | 8 keep n                        | the largest ones, as they were; zero for the rest       |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from typing_extensions import override

from tutti.allreduce.base import GradientLayout, GradientReduction
from tutti.comm.base import Communicator
from tutti.replica import is_finite
from tutti.state import Values

BUCKET: Final = 512
"""Neighbours that share one scale, as in the experiments of the QSGD paper (see `Int8`)."""

ROUND: Final = 8
"""A payload's length is a multiple of this: several of them, end to end, stay aligned."""


class Codec(ABC):
    """A way to compress vectors of floating-point numbers into bytes."""

    @abstractmethod
    def compress(self, vector: Tensor) -> Tensor:
        """Return the payload of a vector, uint8: as long for all vectors of this length and dtype."""

    @abstractmethod
    def add(self, payload: Tensor, total: Tensor, factor: float = 1.0) -> None:
        """Add `factor` times the vector that a payload stands for to `total`; NaN and inf come through."""


def with_feedback(codec: Codec, vector: Tensor, error: Tensor) -> tuple[Tensor, Tensor]:
    """Compress a vector and the error of the vectors before it, which both stay as they are.

        sent  = compress(vector + error)
        error = vector + error - decompress(sent)

    Source: Karimireddy, Rebjock, Stich, Jaggi 2019, "Error Feedback Fixes SignSGD and other Gradient
    Compression Schemes", arXiv 1901.09847, algorithm 2; here the gradient is compressed, not the gradient
    times the learning rate, so that any optimizer can follow.

    Returns:
        The payload, and the new error.
    """
    wanted = error + vector
    payload = codec.compress(wanted)
    codec.add(payload, wanted, -1.0)
    return payload, wanted


@dataclass(frozen=True)
class Cast(Codec):
    """Each number in 16 bits: `torch.bfloat16` or `torch.float16`.

    Finite numbers beyond the range of 16 bits become the largest there is; error feedback sends the rest.
    """

    to: torch.dtype

    @override
    def compress(self, vector: Tensor) -> Tensor:
        most = torch.finfo(self.to).max
        limited = torch.where(vector.isinf(), vector, vector.clamp(-most, most))
        return _joined(limited.to(self.to))

    @override
    def add(self, payload: Tensor, total: Tensor, factor: float = 1.0) -> None:
        values = payload[: len(total) * self.to.itemsize].view(self.to)
        total.add_(values.to(total.dtype), alpha=factor)


@dataclass(frozen=True)
class Int8(Codec):
    """Each number as one of 255 levels of its bucket: round(127 x / max |x|).

    Source: Alistarh, Grubic, Li, Tomioka, Vojnovic 2017, "QSGD: Communication-Efficient SGD via Gradient
    Quantization and Encoding", arXiv 1610.02132 (its practical form: buckets, scaled by their largest
    number). QSGD rounds at random, which is right on average; with error feedback the nearest level is.
    """

    bucket: int = BUCKET

    @override
    def compress(self, vector: Tensor) -> Tensor:
        rows = _rows(vector.float(), self.bucket)
        scales = rows.abs().amax(dim=1) / 127
        divisors = torch.where(scales > 0, scales, 1.0)
        levels = (rows / divisors[:, None]).round_().nan_to_num_(0.0).to(torch.int8)
        return _joined(scales, levels.view(-1)[: len(vector)])

    @override
    def add(self, payload: Tensor, total: Tensor, factor: float = 1.0) -> None:
        buckets = _buckets(len(total), self.bucket)
        scales, rest = payload[: 4 * buckets].view(torch.float32), payload[4 * buckets :]
        levels = _rows(rest[: len(total)].view(torch.int8).float(), self.bucket)
        total.add_(levels.mul_(scales[:, None]).view(-1)[: len(total)].to(total.dtype), alpha=factor)


@dataclass(frozen=True)
class TopK(Codec):
    """The numbers of largest magnitude, exactly, with their places; nothing of the rest.

    Source: Stich, Cordonnier, Jaggi 2018, "Sparsified SGD with Memory", arXiv 1809.07599, definition 2.1 and
    algorithm 1.

    Attributes:
        keep: the share of the numbers that is sent, above 0 and at most 1; at least one is.
    """

    keep: float

    def count(self, length: int) -> int:
        """Return how many of `length` numbers are sent."""
        return min(length, max(1, round(self.keep * length)))

    @override
    def compress(self, vector: Tensor) -> Tensor:
        places = vector.abs().topk(self.count(len(vector)), sorted=False).indices
        return _joined(vector[places], places.to(_index_type(len(vector))))

    @override
    def add(self, payload: Tensor, total: Tensor, factor: float = 1.0) -> None:
        count, kind = self.count(len(total)), _index_type(len(total))
        middle = count * total.itemsize
        values = payload[:middle].view(total.dtype)
        places = payload[middle : middle + count * kind.itemsize].view(kind)
        total.index_add_(0, places, values, alpha=factor)


def _joined(*parts: Tensor) -> Tensor:
    """Return the bytes of vectors, end to end, with zeros up to a multiple of `ROUND`."""
    as_bytes = [part.view(torch.uint8) for part in parts if len(part)]
    padding = -sum(len(part) for part in as_bytes) % ROUND
    return torch.cat([*as_bytes, torch.zeros(padding, dtype=torch.uint8)])


def _buckets(length: int, bucket: int) -> int:
    return -(-length // bucket)


def _rows(vector: Tensor, bucket: int) -> Tensor:
    """Return the vector as a matrix, one bucket a row, padded with zeros; a copy if there are any."""
    return torch.nn.functional.pad(vector, (0, -len(vector) % bucket)).view(-1, bucket)


def _index_type(length: int) -> torch.dtype:
    return torch.int32 if length < 1 << 31 else torch.int64


class Compressed(GradientReduction):
    """A sum of compressed vectors: each rank sends its own to all, and adds up all of them in rank order.

    A sum that is not finite leaves the errors of all ranks as they were.
    """

    def __init__(self, comm: Communicator, layout: GradientLayout, codec: Codec) -> None:
        self._comm, self._codec = comm, codec
        self._error = torch.zeros(layout.length, dtype=layout.wide)
        payload = codec.compress(self._error)
        self._message = torch.zeros(comm.size, len(payload), dtype=torch.uint8)

    @override
    def all_reduce(self, vector: Tensor, share: float) -> int:
        self._message[self._comm.rank], error = with_feedback(self._codec, vector, self._error)
        self._comm.all_gather(self._message.view(-1))
        total = torch.zeros_like(self._error)
        for payload in self._message:
            self._codec.add(payload, total)
        # An update by NaN or inf is left out, or ends the run: its gradients leave nothing behind.
        if is_finite(total):
            self._error = error
        vector.copy_(total)
        return (self._comm.size - 1) * self._message.shape[1]

    @override
    def state(self) -> Values:
        return {"error": self._error}

    @override
    def load_state(self, values: Values) -> None:
        self._error.copy_(values["error"])
