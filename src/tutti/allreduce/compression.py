"""Sums of compressed gradients, with error feedback.

A codec is lossy. Error feedback keeps what was lost and adds it to the next gradient (see `with_feedback`).

| codec    | bytes for n numbers of 32 bits  | what arrives                                            |
|----------|---------------------------------|---------------------------------------------------------|
| `Cast`   | 2 n                             | the nearest 16-bit number                               |
| `Int8`   | n + 4 for each bucket           | the nearest of 255 levels between -max and max          |
| `E3M0`   | n / 2 + 4 for each bucket       | the nearest of max / 2^k, k = 0 .. 6, with its sign; or 0 |
| `TopK`   | 8 keep n                        | the largest ones, as they were; zero for the rest       |
| `ChunkedTopK` | 1.75 keep n + 8 for each chunk | the sign and one of two sizes for the largest ones |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

import numpy
import torch
from torch import Tensor
from typing_extensions import override

from tutti.allreduce.base import GradientLayout, GradientReduction
from tutti.comm.base import Communicator
from tutti.replica import is_finite
from tutti.state import Values

BUCKET: Final = 512
"""Neighbours that share one scale, as in the experiments of the QSGD paper (see `Int8`)."""

CHUNK: Final = 4096
"""Neighbours from which `ChunkedTopK` sends the largest, as in the experiments of its paper."""

PLACE_BITS: Final = 12
"""Bits of a place in a chunk."""

ROUND: Final = 8
"""A payload's length is a multiple of this: several of them, end to end, stay aligned."""


class Codec(ABC):
    """A way to compress vectors of floating-point numbers into bytes."""

    @abstractmethod
    def compress(self, vector: Tensor) -> Tensor:
        """Return the payload of a vector, uint8; its length depends only on the vector's length and dtype."""

    @abstractmethod
    def add(self, payload: Tensor, total: Tensor, factor: float = 1.0) -> None:
        """Add `factor` times the decompressed payload to `total`; NaN and inf come through."""


def with_feedback(codec: Codec, vector: Tensor, error: Tensor, decay: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the payload of a vector plus the earlier error, and the new error; both arguments are kept.

        sent  = compress(vector + decay error)
        error = vector + decay error - decompress(sent)

    Source: Karimireddy, Rebjock, Stich, Jaggi 2019, "Error Feedback Fixes SignSGD and other Gradient
    Compression Schemes", arXiv 1901.09847, algorithm 2; here the gradient is compressed, not the gradient
    times the learning rate, so that any optimizer can follow. There decay is 1.
    """
    wanted = torch.add(vector, error, alpha=decay)
    payload = codec.compress(wanted)
    codec.add(payload, wanted, -1.0)
    return payload, wanted


@dataclass(frozen=True)
class Cast(Codec):
    """Each number in 16 bits: `torch.bfloat16` or `torch.float16`.

    Finite numbers beyond the range become the largest 16-bit number; error feedback sends the rest.
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
    number). QSGD rounds at random, to be unbiased; error feedback allows rounding to the nearest level.
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

    A share `keep` of the numbers is sent, and at least one.

    Source: Stich, Cordonnier, Jaggi 2018, "Sparsified SGD with Memory", arXiv 1809.07599, definition 2.1 and
    algorithm 1.
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


LEVELS: Final = torch.tensor([0.0, *(2.0**-k for k in range(6, -1, -1))])
"""The magnitudes that `E3M0` can send, as shares of the largest one of a bucket."""


@dataclass(frozen=True)
class E3M0(Codec):
    """Each number in 4 bits, a sign and an exponent of 3 bits: 0 or max / 2^k with k = 0 .. 6, the nearest.

    Source: Douillard et al. 2025, "Streaming DiLoCo with overlapping communication", arXiv 2501.18512,
    section 2.4, for the outer gradients of DiLoCo. The paper does not give the scale; here it is the largest
    number of a bucket.
    """

    bucket: int = BUCKET

    @override
    def compress(self, vector: Tensor) -> Tensor:
        rows = _rows(vector.float(), self.bucket)
        scales = rows.abs().amax(dim=1)
        shares = rows.abs() / torch.where(scales > 0, scales, 1.0)[:, None]
        codes = torch.bucketize(shares, (LEVELS[1:] + LEVELS[:-1]) / 2)
        codes += 8 * (rows < 0)
        return _joined(scales, pack(codes.view(-1)[: len(vector)], 4))

    @override
    def add(self, payload: Tensor, total: Tensor, factor: float = 1.0) -> None:
        buckets = _buckets(len(total), self.bucket)
        scales, rest = payload[: 4 * buckets].view(torch.float32), payload[4 * buckets :]
        codes = unpack(rest, len(total), 4)
        values = _rows(torch.cat([LEVELS, -LEVELS])[codes], self.bucket)
        total.add_(values.mul_(scales[:, None]).view(-1)[: len(total)].to(total.dtype), alpha=factor)


@dataclass(frozen=True)
class ChunkedTopK(Codec):
    """The numbers of largest magnitude of each chunk, with their places in it; nothing of the rest.

    A share `keep` of the numbers is sent, and at least one of each chunk. With `quantize` a number takes 2
    bits: its sign, and whether its magnitude is above the mean of the chunk's sent numbers; the numbers above
    arrive as their mean, and so do those below. A place takes 12 bits.

    Source: Sarfi, Therien, Lidin, Belilovsky 2025, "Communication Efficient LLM Pre-training with
    SparseLoCo", arXiv 2508.15706, section 3. The authors' program cuts chunks of 64 x 64 out of matrices;
    here they are consecutive numbers. It sends one of four means of ranges that are 1.5 standard deviations
    wide, for a whole parameter.
    """

    keep: float
    quantize: bool = True

    def _shape(self, length: int) -> tuple[int, int]:
        """Return the length of a chunk, and how many of its numbers are sent."""
        chunk = max(1, min(length, CHUNK))
        return chunk, max(1, round(self.keep * chunk))

    @override
    def compress(self, vector: Tensor) -> Tensor:
        chunk, count = self._shape(len(vector))
        rows = _rows(vector, chunk)
        places = rows.abs().topk(count, dim=1, sorted=False).indices
        values = rows.gather(1, places)
        packed = pack(places.view(-1), PLACE_BITS)
        if not self.quantize:
            return _joined(values.view(-1), packed)
        sizes = values.abs().float()
        large = sizes > sizes.mean(dim=1, keepdim=True)
        means = [(sizes * chosen).sum(1) / chosen.sum(1).clamp(min=1) for chosen in (~large, large)]
        codes = large + 2 * (values < 0)
        return _joined(torch.stack(means, dim=1).view(-1), packed, pack(codes.view(-1), 2))

    @override
    def add(self, payload: Tensor, total: Tensor, factor: float = 1.0) -> None:
        chunk, count = self._shape(len(total))
        chunks = _buckets(len(total), chunk)
        number = chunks * count
        middle = chunks * 8 if self.quantize else number * total.itemsize
        places = unpack(payload[middle:], number, PLACE_BITS).view(chunks, count)
        if self.quantize:
            means = payload[:middle].view(torch.float32).view(chunks, 2)
            codes = unpack(payload[middle + _packed(number, PLACE_BITS) :], number, 2).view(chunks, count)
            values = torch.cat([means, -means], dim=1).gather(1, codes).to(total.dtype)
        else:
            values = payload[:middle].view(total.dtype).view(chunks, count)
        rows = torch.zeros(chunks, chunk, dtype=total.dtype).scatter_(1, places, values)
        total.add_(rows.view(-1)[: len(total)], alpha=factor)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Return whole numbers from 0 to below 2^bits as bytes, end to end."""
    digits = (codes[:, None] >> torch.arange(bits)).to(torch.uint8) & 1
    return torch.from_numpy(numpy.packbits(digits.numpy()))


def unpack(payload: Tensor, count: int, bits: int) -> Tensor:
    """Return the first `count` numbers that `pack` has packed."""
    digits = torch.from_numpy(numpy.unpackbits(payload.numpy(), count=count * bits)).view(count, bits)
    return (digits.long() << torch.arange(bits)).sum(dim=1)


def _packed(count: int, bits: int) -> int:
    return -(-count * bits // 8)


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

    A sum that is not finite leaves the errors of all ranks as they were. `decay` is the share of the error
    that is added to the next vector; 0: there is no feedback.
    """

    def __init__(self, comm: Communicator, layout: GradientLayout, codec: Codec, decay: float = 1.0) -> None:
        self._comm, self._codec, self._decay = comm, codec, decay
        self._error = torch.zeros(layout.length, dtype=layout.wide)
        payload = codec.compress(self._error)
        self._message = torch.zeros(comm.size, len(payload), dtype=torch.uint8)

    @override
    def all_reduce(self, vector: Tensor, share: float) -> int:
        self._message[self._comm.rank], error = with_feedback(self._codec, vector, self._error, self._decay)
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
        return {"error": self._error} if self._decay else {}

    @override
    def load_state(self, values: Values) -> None:
        self._error.copy_(values["error"])
