"""Stored bytes become float32 of mean 0 and deviation 1."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from tutti.data import DataSet, Part, Scale
from tutti.data.scale import pixel_scale

EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("shape", [(50, 1, 4, 5), (50, 3, 4, 5), (50, 20), (50, 2, 3, 4, 5)])
def test_pixels_are_scaled_to_mean_zero_and_deviation_one(shape):
    stored = np.random.default_rng(0).integers(0, 200, shape, dtype=np.uint8)
    scale = pixel_scale(stored.__getitem__, np.arange(len(stored)))
    seen = scale.apply(torch.from_numpy(stored))
    assert seen.dtype == torch.float32
    assert len(scale.mean) == (3 if shape[1] == 3 else 1)
    channels = seen.transpose(0, 1).flatten(1) if len(scale.mean) == 3 else seen.reshape(1, -1)
    # What is rounded, the factor, the offset and the sum, is below 4 in size: pixels are evenly distributed.
    bound = 4 * 4 * EPS
    ones = torch.ones(len(scale.mean), dtype=torch.float64)
    torch.testing.assert_close(channels.double().mean(1), 0 * ones, atol=bound, rtol=0)
    torch.testing.assert_close(channels.double().std(1, correction=0), ones, atol=bound, rtol=0)


def test_scale_is_exact_to_float32():
    scale = Scale(mean=(0.25, 0.5, 0.75), std=(0.1, 0.2, 0.4))
    stored = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    mean, std = (torch.tensor(one, dtype=torch.float64)[:, None] for one in (scale.mean, scale.std))
    pixels = stored.double() / 255
    rounded = 2 * EPS * (pixels / std + mean / std)
    assert ((scale.apply(stored) - (pixels - mean) / std).abs() <= rounded).all()


def test_constant_pixels_become_zero():
    scale = pixel_scale(np.full((5, 1, 2, 2), 7, np.uint8).__getitem__, np.arange(5))
    assert scale.apply(torch.full((2, 1, 2, 2), 7, dtype=torch.uint8)).abs().max() < 1e-6


def test_without_scale_inputs_stay_as_they_are():
    for dtype in (torch.float32, torch.float64, torch.int64):
        x = torch.arange(6).to(dtype)
        assert torch.equal(Scale().apply(x), x)


def test_taken_samples_are_in_new_memory():
    part = Part(torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64))
    inputs, targets = part.take(torch.tensor([1, 1, 3]))
    inputs += 1
    targets += 1
    assert part.inputs.sum() == 0
    assert part.targets.sum() == 0
    bytes_part = Part(torch.zeros(4, 2, dtype=torch.uint8), torch.zeros(4), Scale((0.5,), (1.0,)))
    assert bytes_part.take(torch.tensor([0]))[0].tolist() == [[-0.5, -0.5]]


def test_a_scale_travels_between_processes():
    scale = pickle.loads(pickle.dumps(Scale((0.5,), (0.25,))))
    assert scale == Scale((0.5,), (0.25,))
    assert scale.apply(torch.tensor([[255]], dtype=torch.uint8)).item() == pytest.approx(2.0)


def test_samples_are_taken_where_the_data_set_lies():
    scale = Scale((0.1, 0.2, 0.3), (1.0, 1.0, 1.0))
    part = Part(torch.zeros(4, 3, 2, 2, dtype=torch.uint8), torch.zeros(4), scale)
    moved = DataSet("some", part, None, part, None, ()).on("meta")
    for one in (moved.train, moved.test):
        inputs, targets = one.take(torch.tensor([2, 0]))
        assert inputs.device.type == targets.device.type == "meta"
        assert inputs.shape == (2, 3, 2, 2)
        assert one.scale == scale
    assert moved.validation is None


def test_a_data_set_knows_how_much_memory_it_takes():
    one, other = (Part(torch.zeros(4, 2, dtype=torch.uint8), torch.zeros(4)) for _ in range(2))
    assert DataSet("some", one, other, None, None, ()).nbytes == 2 * (8 + 16)
