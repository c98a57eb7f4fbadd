"""What is advised, from records with known times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tutti.records.run import EpochRecord, Evaluation, RankRecord, Summary, World
from tutti.reports.advice import advice, past_the_best, rare_class, stages_by_rank, where_the_time_went


def ranks(*others: dict[str, float], **stages: float) -> list[dict[str, float]]:
    """Two ranks alike, with 6 seconds of computing each, unless more are given."""
    one = {"forward": 2.0, "backward": 4.0, "samples": 600.0, **stages}
    return [one, *(others or (one,))]


def config(**settings: Any) -> dict[str, Any]:
    return {"batch_size": 32, "validation": 0.1, **settings}


@pytest.mark.parametrize(
    ("stages", "settings", "said"),
    [
        ({"wait": 0.3, "reduce": 0.2}, {}, "stands out: forward and backward take 92% of the time"),
        (
            {"data": 4.0},
            {},
            "getting the batches takes 40% of the time: try --batch-size 128, for fewer batches",
        ),
        ({"data": 4.0}, {"augment": "flip"}, "for fewer batches, or less --augment"),
        ({"copy": 2.0}, {}, "takes 25% of the time: try --batch-size 128, or --layout contiguous"),
        ({"wait": 4.0}, {}, "40% of the time: try --batch-size 128, for more work between exchanges, or a"),
        ({"wait": 4.0}, {"parallel": "data=2,pipeline=2"}, "try more --parallel.microbatches, or --batch"),
        ({"reduce": 2.0}, {}, "exchanging with others, waiting aside, takes 25% of the time"),
        ({"update": 3.0}, {}, "try --batch-size 128, for fewer updates"),
        ({"validation": 2.0}, {"validation": 0.2}, "try --validation 0.05"),
        ({"checkpoint": 2.0}, {"checkpoint": "5s"}, "fewer checkpoints (--checkpoint is 5s), or more --ep"),
    ],
)
def test_the_largest_part_with_a_remedy_is_named(
    stages: dict[str, float], settings: dict[str, Any], said: str
) -> None:
    assert said in advice(ranks(**stages), config(**settings))


def test_a_slow_rank_is_named_with_what_gives_it_less_work() -> None:
    slow = {"forward": 3.0, "backward": 6.0, "samples": 600.0}
    said = advice(ranks(slow), config())
    assert said.startswith("nothing stands out: ")
    slowest = (
        "; rank 1 is the slowest: a sample takes it 1.5 times as long as the fastest: what else runs there?"
    )
    assert said.endswith(f"{slowest} See also --balance")
    assert advice(ranks(slow, wait=6.0), config(balance="speed")).endswith(slowest)
    # Ranks that hold one model together compute parts of different sizes, and a server has no samples.
    assert "slowest" not in advice(ranks(slow), config(parallel="pipeline=2"))
    assert "slowest" not in advice(ranks({"wait": 0.1}), config())


@pytest.mark.parametrize(
    ("confusion", "settings", "said"),
    [
        ([[95, 0], [4, 1]], {}, "class yes is rare, and 1 of its 5 samples were found: try --class-weights"),
        ([[1, 4, 0], [0, 94, 1]], {}, "class no is rare, and 1 of its 5"),
        ([[95, 0], [2, 3]], {}, ""),  # found
        ([[80, 0], [20, 0]], {}, ""),  # not rare
        ([[95, 0], [5, 0]], {"sampling": "balanced"}, ""),
        ([[95, 0], [5, 0]], {"class_weights": "1,9"}, ""),
        ([[90, 0, 0], [5, 0, 0], [5, 0, 0]], {}, ""),
        (None, {}, ""),
    ],
)
def test_a_rare_class_that_is_hardly_found_is_named_with_remedies(
    confusion: list[list[int]] | None, settings: dict[str, Any], said: str
) -> None:
    found = Evaluation(100, 0.1, {"balanced_accuracy": 0.6}, confusion)
    tested = Summary.of([], found, 1, World())
    advised = rare_class(tested, ("no", "yes", "maybe"), config(**settings))
    assert advised.startswith(said)
    assert bool(advised) == bool(said)
    assert ("--monitor val_balanced_accuracy" in advised) == bool(said)
    assert rare_class(replace(tested, test=None, validation=found), ("no", "yes"), settings) == advised


@pytest.mark.parametrize(
    ("losses", "settings", "said"),
    [
        ([0.9, 0.5, 0.8, 0.9], {}, "the best epoch was 2: --restore-best keeps it, --patience 2 ends"),
        (
            [0.5, 0.6, 0.7, 0.7, 0.7, 0.7],
            {},
            "the best epoch was 1: --restore-best keeps it, --patience 3 ends",
        ),
        ([0.9, 0.5, 0.8, 0.9], {"restore_best": True}, ""),
        ([0.9, 0.5, 0.51], {}, ""),
        ([0.9, 0.5, 0.4], {}, ""),
        ([], {}, ""),
    ],
)
def test_a_best_epoch_that_was_left_is_named(
    losses: list[float], settings: dict[str, Any], said: str
) -> None:
    history = [replace(record(), epoch=k, validation=Evaluation(9, x)) for k, x in enumerate(losses, 1)]
    advised = past_the_best(history, config(**settings))
    assert (advised.startswith(said), bool(advised)) == (True, bool(said))


def record(*ranks: RankRecord) -> EpochRecord:
    return EpochRecord(1, 8, True, Evaluation(1, 0.5), None, {"total": 1.0}, 1.0, 0.1, "now", list(ranks))


def test_stages_are_added_up_over_the_epochs_for_each_rank() -> None:
    first = RankRecord(samples=5, stages={"forward": 1.0, "wait": 0.5})
    second = RankRecord(samples=7, stages={"forward": 2.0})
    one, other = stages_by_rank([record(first, second), record(first, second)])
    assert (one["forward"], one["wait"], one["samples"]) == (2.0, 1.0, 10)
    assert (other["forward"], other["wait"], other["samples"]) == (4.0, 0.0, 14)


def test_advice_follows_from_the_epochs() -> None:
    rank = RankRecord(samples=5, stages={"forward": 1.0, "wait": 1.0})
    two = record(rank, rank)
    assert where_the_time_went([], config()) == ""
    assert where_the_time_went([two, two], config()).startswith("waiting for others takes 50% of")
