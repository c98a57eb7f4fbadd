"""Advice, from records with known times."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tutti.records.run import EpochRecord, Evaluation, RankRecord, Summary, World
from tutti.reports.advice import advice, past_the_best, rare_class, stages_by_rank, where_the_time_went


def ranks(*others: dict[str, float], **stages: float) -> list[dict[str, float]]:
    """Return two equal ranks, with 60 seconds of computing each, or other ranks."""
    one = {"forward": 20.0, "backward": 40.0, "samples": 600.0, **stages}
    return [one, *(others or (one,))]


def config(**settings: Any) -> dict[str, Any]:
    return {"batch_size": 32, "validation": 0.1, **settings}


@pytest.mark.parametrize(
    ("stages", "settings", "said"),
    [
        ({"wait": 13.0, "reduce": 12.0}, {}, ""),
        ({"forward": 2.0, "backward": 4.0, "wait": 9.0}, {}, ""),  # a short run
        (
            {"data": 40.0},
            {},
            "getting the batches takes 40 of 100 s, as there are 38 batches of 32 samples: try --batch-size",
        ),
        ({"data": 40.0}, {"augment": "flip"}, "for fewer batches, or less --augment"),
        ({"copy": 20.0}, {}, "takes 20 of 80 s: try --batch-size 128, or --layout contiguous"),
        (
            {"wait": 40.0},
            {},
            ", as 2 ranks meet every 32 samples (2,666.7 ms): try --batch-size 128, for more work "
            "between exchanges, or a strategy",
        ),
        ({"wait": 40.0}, {"strategy": "easgd"}, "ms): try a larger --strategy.every, for fewer exchanges"),
        ({"wait": 70.0}, {}, "70 of 130 s, more than 2 ranks gain: one would be no slower, try -n 1"),
        ({"wait": 70.0}, {"parallel": "data=2,pipeline=2"}, "try more --parallel.microbatches, or --batch"),
        ({"reduce": 20.0}, {}, "exchanging with others takes 20 of 80 s, as 2 ranks meet"),
        ({"update": 30.0}, {}, "try --batch-size 128, for fewer updates"),
        ({"validation": 20.0}, {"validation": 0.2}, "try --validate background, or --validation 0.05"),
        ({"checkpoint": 20.0}, {"checkpoint": "5s"}, "fewer checkpoints (--checkpoint is 5s), or more --ep"),
    ],
)
def test_the_most_expensive_stage_with_a_remedy_is_named(
    stages: dict[str, float], settings: dict[str, Any], said: str
) -> None:
    advised = advice(ranks(**stages), config(**settings))
    assert said in advised
    assert bool(said) == bool(advised)


def test_a_slow_rank_that_others_wait_for_is_named_with_the_option_for_less_work() -> None:
    slow = {"forward": 30.0, "backward": 60.0, "samples": 600.0}
    assert advice(ranks(slow), config()) == ""  # Nobody waits for it.
    slowest = ", as rank 1 is the slowest: a sample takes it 1.5 times as long as the fastest: what else runs"
    slowest += " there?"
    assert advice(ranks(slow, wait=60.0), config()).endswith(f"{slowest} See also --balance")
    assert advice(ranks(slow, wait=60.0), config(balance="speed")).endswith(slowest)
    # The parts of a divided model have different sizes, and a server has no samples.
    assert "slowest" not in advice(ranks(slow, wait=60.0), config(parallel="pipeline=2"))
    assert "slowest" not in advice(ranks({"wait": 0.1}, wait=60.0), config())


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
        (
            [0.9, 0.5, 0.8, 0.9],
            {},
            "the validation loss rose from 0.5 in epoch 2 to 0.9: --restore-best keeps the weights of epoch 2"
            ", --patience 2 ends the run sooner",
        ),
        (
            [0.5, 0.6, 0.7, 0.7, 0.7, 0.7],
            {"patience": 5},
            "the validation loss rose from 0.5 in epoch 1 to 0.7: --restore-best keeps the weights of "
            "epoch 1",
        ),
        ([0.9, 0.5, 0.8, 0.9], {"restore_best": True}, ""),
        ([0.9, 0.5, 0.51], {}, ""),
        ([0.9, 0.5, 0.4], {}, ""),
        ([], {}, ""),
    ],
)
def test_the_best_epoch_is_named_if_the_loss_rose_afterwards(
    losses: list[float], settings: dict[str, Any], said: str
) -> None:
    history = [replace(record(), epoch=k, validation=Evaluation(9, x)) for k, x in enumerate(losses, 1)]
    advised = past_the_best(history, config(**settings))
    assert advised == said


def record(*ranks: RankRecord) -> EpochRecord:
    return EpochRecord(1, 8, True, Evaluation(1, 0.5), None, {"total": 1.0}, 1.0, 0.1, "now", list(ranks))


def test_stages_are_added_up_over_the_epochs_for_each_rank() -> None:
    first = RankRecord(samples=5, stages={"forward": 1.0, "wait": 0.5})
    second = RankRecord(samples=7, stages={"forward": 2.0})
    one, other = stages_by_rank([record(first, second), record(first, second)])
    assert (one["forward"], one["wait"], one["samples"]) == (2.0, 1.0, 10)
    assert (other["forward"], other["wait"], other["samples"]) == (4.0, 0.0, 14)


def test_the_epochs_of_a_run_give_its_advice() -> None:
    rank = RankRecord(samples=5, stages={"forward": 10.0, "wait": 5.0})
    two = record(rank, rank)
    assert where_the_time_went([], config()) == ""
    assert where_the_time_went([two, two], config()).startswith("waiting for others takes 10 of 30 s, ")
