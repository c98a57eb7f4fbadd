"""Weighted sampling: the same at every number of ranks, and after a resume."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from tutti.data.batches import Batches, Queue
from tutti.data.parts import Part
from tutti.data.sampling import chances_of
from tutti.errors import UserError
from tutti.state import Saved

SKEWED = Part(torch.zeros(100, 1), torch.tensor([0] * 90 + [1] * 8 + [2] * 2))
BALANCED = chances_of("balanced", SKEWED)


NUMBERED = Part(torch.arange(100.0)[:, None], SKEWED.targets)
"""The same, each sample with its number."""


def taken(batches: Batches, epoch: int, first: int = 0) -> list[list[int]]:
    """The draws of each update of an epoch."""
    return [torch.cat([one.samples for one in passes]).tolist() for _, passes in batches.epoch(epoch, first)]


def samples_in(batches: Batches, epoch: int) -> list[int]:
    """The samples that an epoch trains with, as their inputs say."""
    return [int(number) for _, passes in batches.epoch(epoch) for one in passes for number in one.inputs]


def test_every_class_is_drawn_as_often_as_any_other() -> None:
    batches = Batches(SKEWED, 10, chances=BALANCED)
    drawn = torch.cat([batches.drawn(epoch) for epoch in range(100)])
    counts = torch.bincount(SKEWED.targets[drawn])
    assert counts.sum() == 10_000
    # Five standard deviations of a binomial distribution.
    assert (counts - 10_000 / 3).abs().max() < 5 * (10_000 * 2 / 9) ** 0.5
    assert not torch.equal(batches.drawn(0), batches.drawn(1))
    assert torch.equal(batches.drawn(1), Batches(SKEWED, 10, chances=BALANCED).drawn(1))
    assert samples_in(Batches(NUMBERED, 12, chances=BALANCED), 1) == batches.drawn(1).tolist()


@pytest.mark.parametrize("ranks", [2, 3])
def test_any_number_of_ranks_takes_the_same_samples(ranks: int) -> None:
    alone = taken(Batches(SKEWED, 12, chances=BALANCED), 3)
    shares = [taken(Batches(SKEWED, 12, rank, ranks, chances=BALANCED), 3) for rank in range(ranks)]
    assert [sorted(chain(*parts)) for parts in zip(*shares, strict=True)] == [sorted(one) for one in alone]


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_is_left_of_an_epoch_is_drawn_after_a_resume(ranks: int) -> None:
    whole = Batches(SKEWED, 12, chances=BALANCED)
    saved = cast("Saved", SimpleNamespace(shared=whole.state(3, [4]).shared, own={} if ranks == 1 else None))
    resumed: list[int] = []
    for rank in range(ranks):
        batches = Batches(SKEWED, 12, rank, ranks, chances=BALANCED)
        resumed += chain(*taken(batches, 3, batches.load_state(3, saved)))
    assert sorted(resumed) == sorted(chain(*taken(whole, 3)[4:]))


def test_a_queue_deals_what_was_drawn() -> None:
    tickets = iter(range(100))
    batches = Batches(SKEWED, 10, own=True, chances=BALANCED)
    assert taken(Queue(batches, lambda count: next(tickets)), 0) == taken(batches, 0)


def test_weights_are_those_of_the_part_s_samples_and_0_is_never_drawn(tmp_path: Path) -> None:
    weights = np.zeros(100)
    weights[[3, 7, 95]] = 1.0, 3.0, 100.0
    np.save(tmp_path / "weights.npy", weights)
    rows = torch.tensor([7, 8, 3, 9])
    part = Part(SKEWED.stored_inputs, SKEWED.stored_targets, rows=rows)
    for given in (weights, torch.from_numpy(weights), f"{tmp_path}/weights.npy"):
        chances = chances_of(given, part)
        assert chances.tolist() == [3.0, 0.0, 1.0, 0.0]
    drawn = torch.cat([Batches(part, 2, seed=seed, chances=chances).drawn(0) for seed in range(50)])
    assert set(drawn.tolist()) == {0, 2}
    labels = Part(torch.zeros(3, 1), torch.tensor([-100, 4, 0]))
    assert chances_of("balanced", labels).tolist() == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("given", "targets", "message"),
    [
        ("balanced", torch.tensor([0.5, 0.2]), "no single class"),
        ("balanced", torch.ones(2, 3), "no single class"),
        ("nowhere.npy", torch.tensor([0, 1]), "nowhere.npy"),
        ([1.0], torch.tensor([0, 1]), r"shape \(1,\); give one number for each of 2"),
        ([1.0, -1.0], torch.tensor([0, 1]), "finite numbers from 0"),
        ([0.0, 0.0], torch.tensor([0, 1]), "not all be 0"),
    ],
)
def test_weights_that_do_not_fit_are_refused(given, targets, message: str) -> None:
    with pytest.raises(UserError, match=message):
        chances_of(given, Part(torch.zeros(2, 1), targets))
