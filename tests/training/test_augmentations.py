"""Training batches are changed by sample: the same tensors on any number of ranks, and after a resume."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tutti.data import Batches, Part, Queue, Scale
from tutti.errors import BadOption, UnknownName
from tutti.training.augmentations import AUGMENTATIONS, Augmentation, SampleRandom
from tutti.training.sample_words import keys_of

STORED = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (41, 3, 6, 7), dtype=np.uint8))
PART = Part(STORED, torch.arange(41), Scale((0.4, 0.5, 0.6), (0.2, 0.3, 0.25)))


def jitter(inputs: Tensor, targets: Tensor, random: SampleRandom) -> tuple[Tensor, Tensor]:
    return inputs * (1 + random.uniform(3, 1, 1)) + random.uniform(1, 6, 1), targets


def tensors(batches: list[Batches], epoch: int, first: int = 0) -> Counter[bytes]:
    """All samples that the ranks train on, by their bits."""
    found: Counter[bytes] = Counter()
    for one in batches:
        for _, passes in one.epoch(epoch, first):
            for batch in passes:
                for inputs, target in zip(batch.inputs, batch.targets, strict=True):
                    found[inputs.numpy().tobytes() + target.numpy().tobytes()] += 1
    return found


def dealt(ranks: int, seed: int = 0, **kinds: Any) -> list[Batches]:
    spec = ["crop", "flip", jitter]
    found = [Batches(PART, 8, rank, ranks, seed=seed, **kinds) for rank in range(ranks)]
    for one in found:
        one.augment = Augmentation(spec, {"crop": 2}, PART, seed)
    return found


def test_an_epoch_has_the_same_tensors_on_any_number_of_ranks() -> None:
    whole = tensors(dealt(1), 3)
    assert whole.total() == 41
    for kinds in ({}, {"own": True}, {"passes": 2}):
        for ranks in (2, 3):
            assert tensors(dealt(ranks, **kinds), 3) == whole
    tickets = iter(range(100))
    queue = Queue(dealt(1, own=True)[0], lambda count: next(tickets))
    queue.augment = dealt(1)[0].augment
    assert tensors([queue], 0) == tensors(dealt(2), 0)
    # Resumed in the middle of the epoch, on another number of ranks.
    rest = tensors(dealt(2), 3, first=3)
    assert rest <= whole
    assert rest == tensors(dealt(1), 3, first=3)
    assert not tensors(dealt(1), 4) & whole
    assert not tensors(dealt(1, seed=1), 3) & whole


def random_of(count: int) -> SampleRandom:
    return SampleRandom(keys_of(torch.arange(count), 0, 0, 2), torch.device("cpu"))


def test_crops_are_windows_of_the_image_in_zeros() -> None:
    inputs = torch.arange(1.0, 1 + 400 * 2 * 4 * 5).view(400, 2, 4, 5)
    found, _ = AUGMENTATIONS["crop"](inputs.clone(), torch.zeros(400), random_of(400), 1)
    padded = torch.nn.functional.pad(inputs, (1, 1, 1, 1))
    places = Counter[tuple[int, int]]()
    for image, one in zip(padded, found, strict=True):
        fits = [
            (y, x) for y in range(3) for x in range(3) if torch.equal(image[:, y : y + 4, x : x + 5], one)
        ]
        assert len(fits) == 1
        places[fits[0]] += 1
    assert len(places) == 9
    assert min(places.values()) > 20


def test_flips_are_of_a_share_of_the_images() -> None:
    inputs = torch.rand(400, 2, 4, 5, generator=torch.Generator().manual_seed(0)) + 1
    found, _ = AUGMENTATIONS["flip"](inputs.clone(), torch.zeros(400), random_of(400), 0.25)
    turned = [torch.equal(one.flip(2), other) for one, other in zip(inputs, found, strict=True)]
    same = [torch.equal(one, other) for one, other in zip(inputs, found, strict=True)]
    assert all(a != b for a, b in zip(turned, same, strict=True))
    assert 60 < sum(turned) < 140


def test_numbers_are_uniform_and_unrelated() -> None:
    random = random_of(2000)
    first, second = random.uniform(3), random.uniform(3)
    assert first.shape == (2000, 3)
    both = torch.cat([first, second], 1).double()
    assert (both.mean(0) - 0.5).abs().max() < 0.03
    assert (torch.corrcoef(both.T) - torch.eye(6)).abs().max() < 0.1
    counts = random.integers(7, 5).flatten().bincount()
    assert len(counts) == 7
    assert counts.min() > 0.85 * 10_000 / 7


@pytest.mark.parametrize(
    ("spec", "options", "error", "said"),
    [
        ("crap", {}, UnknownName, "did you mean 'crop'"),
        ("crop", {"flip": 1}, UnknownName, "flip"),
        ("crop", {"crop": 0.5}, BadOption, "whole number of pixels"),
        ("flip", {"flip": 2}, BadOption, "a share from 0 to 1"),
        (lambda inputs, targets, random: inputs, {}, BadOption, "must return a pair"),
        (lambda inputs, targets, random: (inputs[:, :1], targets), {}, BadOption, "must leave shapes"),
    ],
)
def test_what_is_no_transform_is_refused(spec: Any, options: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Augmentation(spec, options, PART, 0)
