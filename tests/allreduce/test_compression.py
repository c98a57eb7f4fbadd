"""Codecs against numbers worked by hand, and what error feedback keeps."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from tutti.allreduce.compression import (
    E3M0,
    Cast,
    ChunkedTopK,
    Codec,
    Int8,
    TopK,
    with_feedback,
)

CODECS = [
    Cast(torch.bfloat16),
    Cast(torch.float16),
    Int8(),
    Int8(bucket=8),
    TopK(0.25),
    E3M0(),
    ChunkedTopK(0.25),
    ChunkedTopK(0.25, quantize=False),
]
LENGTHS = [0, 1, 7, 8, 511, 512, 513, 2000]


def there_and_back(codec: Codec, vector: Tensor) -> Tensor:
    return decompress(codec, codec.compress(vector), len(vector), vector.dtype)


def decompress(codec: Codec, payload: Tensor, length: int, dtype: torch.dtype = torch.float32) -> Tensor:
    vector = torch.zeros(length, dtype=dtype)
    codec.add(payload, vector)
    return vector


def test_bf16_keeps_eight_bits_of_the_mantissa() -> None:
    # Neighbours of 1 in bfloat16 are 1 + 2^-7 and 1 - 2^-8.
    found = there_and_back(Cast(torch.bfloat16), torch.tensor([1.0, 1 + 2**-7, 1 + 2**-9, 3e38]))
    assert found.tolist() == pytest.approx([1.0, 1 + 2**-7, 1.0, 3e38], rel=2**-8)
    assert found[:3].tolist() == [1.0, 1 + 2**-7, 1.0]


def test_fp16_keeps_eleven_bits_and_limits_large_numbers() -> None:
    found = there_and_back(Cast(torch.float16), torch.tensor([1 + 2**-10, 1 + 2**-12, 1e6, -1e6]))
    assert found.tolist() == [1 + 2**-10, 1.0, 65504.0, -65504.0]


def test_int8_rounds_to_the_nearest_of_255_levels() -> None:
    # max |x| = 254, so a level is 2 wide: 3.1 -> level 1.55 -> 2 -> 4; -100.9 -> -50.45 -> -50 -> -100.
    found = there_and_back(Int8(), torch.tensor([254.0, 3.1, -100.9, 0.9, 0.0]))
    assert found.tolist() == [254.0, 4.0, -100.0, 0.0, 0.0]


def test_int8_has_a_scale_for_each_bucket() -> None:
    found = there_and_back(Int8(bucket=2), torch.tensor([1270.0, 10.0, 12.7, 0.1, 0.0]))
    assert found.tolist() == pytest.approx([1270.0, 10.0, 12.7, 0.1, 0.0])


def test_top_k_sends_the_largest_and_nothing_else() -> None:
    found = there_and_back(TopK(keep=0.4), torch.tensor([0.5, -3.0, 0.1, 2.0, -1.0]))
    assert found.tolist() == [0.0, -3.0, 0.0, 2.0, 0.0]


def test_e3m0_has_seven_powers_of_two_and_zero() -> None:
    # Between 0.5 and 1 the border is 0.75; the smallest is 2^-6, and below 2^-7 is nearer to 0.
    numbers = [16.0, -11.9, 12.1, 1.0, -0.25, 0.13, -0.12, 0.0]
    assert there_and_back(E3M0(), torch.tensor(numbers)).tolist() == [16, -8, 16, 1, -0.25, 0.25, 0, 0]


def test_a_chunk_sends_its_largest_as_one_of_two_means() -> None:
    # The mean magnitude of 6, 3, 2 and 1 is 3: 6 is above it; the others arrive as their mean of 2.
    found = there_and_back(ChunkedTopK(0.5), torch.tensor([0.5, -6.0, 0.1, 3.0, -1.0, 0.2, 2.0, 0.3]))
    assert found.tolist() == [0, -6, 0, 2, -2, 0, 2, 0]


def test_each_chunk_of_4096_sends_as_many() -> None:
    vector = torch.arange(8192.0).add_(1)
    found = there_and_back(ChunkedTopK(1 / 1024, quantize=False), vector)
    assert found.nonzero().flatten().tolist() == [*range(4092, 4096), *range(8188, 8192)]
    assert torch.equal(found[-4:], vector[-4:])


@pytest.mark.parametrize(("keep", "length", "count"), [(0.01, 5, 1), (0.5, 4, 2), (1.0, 4, 4), (0.3, 10, 3)])
def test_top_k_sends_at_least_one_number(keep: float, length: int, count: int) -> None:
    assert TopK(keep).count(length) == count


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_the_length_of_a_payload_does_not_depend_on_its_values(
    codec: Codec, dtype: torch.dtype, length: int
) -> None:
    payload = codec.compress(torch.randn(length, dtype=dtype))
    assert payload.dtype == torch.uint8
    assert len(payload) == len(codec.compress(torch.zeros(length, dtype=dtype)))
    assert len(payload) % 8 == 0


@pytest.mark.parametrize(
    ("codec", "nbytes"),
    [
        (Cast(torch.bfloat16), 2048),
        (Int8(), 1024 + 8),
        (TopK(1 / 32), 256),
        (E3M0(), 512 + 8),
        (ChunkedTopK(1 / 32), 32 * 14 // 8 + 8),
    ],
    ids=str,
)
def test_payloads_are_as_short_as_the_table_says(codec: Codec, nbytes: int) -> None:
    assert len(codec.compress(torch.ones(1024))) == nbytes


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_a_broken_number_stays_broken(codec: Codec, broken: float) -> None:
    vector = torch.randn(700)
    vector[600] = broken
    assert not there_and_back(codec, vector).isfinite().all()


def test_error_feedback_by_hand() -> None:
    # Top 1 of 2 numbers. Step 1: [3, 1] sends 3, keeps [0, 1]. Step 2: [1, 1] + [0, 1] = [1, 2] sends 2,
    # keeps [1, 0]. Step 3: [0.5, 0] + [1, 0] sends 1.5, keeps nothing.
    codec, error = TopK(keep=0.5), torch.zeros(2)
    sent = []
    for vector in ([3.0, 1.0], [1.0, 1.0], [0.5, 0.0]):
        payload, error = with_feedback(codec, torch.tensor(vector), error)
        sent.append(decompress(codec, payload, 2).tolist())
    assert sent == [[3.0, 0.0], [0.0, 2.0], [1.5, 0.0]]
    assert error.tolist() == [0.0, 0.0]


def test_a_part_of_the_error_is_kept() -> None:
    # [3, 2.5] + 0.5 [0, 2] = [3, 3.5] sends 3.5.
    error = torch.tensor([0.0, 2.0])
    payload, error = with_feedback(TopK(keep=0.5), torch.tensor([3.0, 2.5]), error, decay=0.5)
    assert decompress(TopK(keep=0.5), payload, 2).tolist() == [0.0, 3.5]
    assert error.tolist() == [3.0, 0.0]


@pytest.mark.parametrize("codec", CODECS, ids=str)
def test_sent_and_left_out_numbers_add_up_to_the_input(codec: Codec) -> None:
    generator = torch.Generator().manual_seed(0)
    given, arrived, error = (torch.zeros(700, dtype=torch.float64) for _ in range(3))
    for _ in range(50):
        vector = torch.randn(700, generator=generator, dtype=torch.float64)
        before = vector.clone()
        payload, error = with_feedback(codec, vector, error)
        assert torch.equal(vector, before)
        given += vector
        codec.add(payload, arrived)
    assert torch.allclose(arrived + error, given, atol=1e-4)
    # The error stays bounded: it does not grow with the number of steps.
    assert error.norm() < 10 * math.sqrt(700)
