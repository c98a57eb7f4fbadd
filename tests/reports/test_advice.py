"""What is advised, from records with known times."""

from __future__ import annotations

from typing import Any

import pytest

from tutti.records.run import EpochRecord, Evaluation, RankRecord
from tutti.reports.advice import advice, stages_by_rank, where_the_time_went
from tutti.run.config import TrainConfig
from tutti.strategies import STRATEGIES

NAMES = tuple(STRATEGIES)


def ranks(*others: dict[str, float], **stages: float) -> list[dict[str, float]]:
    """Two ranks alike, with 6 seconds of computing each, unless more are given."""
    one = {"forward": 2.0, "backward": 4.0, "samples": 600.0, **stages}
    return [one, *(others or (one,))]


Run = tuple[dict[str, Any], str]
"""A run's configuration, and the pace of its strategy."""


def run(strategy: str = "sync", **settings: Any) -> Run:
    return {"batch_size": 32, "validation": 0.1, **settings}, STRATEGIES[strategy].pace.name.lower()


@pytest.mark.parametrize(
    ("stages", "one", "said"),
    [
        ({"wait": 0.3, "reduce": 0.2}, run(), "stands out: forward and backward take 92% of the time"),
        ({"data": 4.0}, run(), "getting the batches takes 40% of the time: try the data as arrays"),
        ({"copy": 2.0}, run(), "takes 25% of the time: try --batch-size 128, or --layout contiguous"),
        ({"wait": 4.0}, run(), "40% of the time: try --batch-size 128, or a strategy whose workers"),
        ({"wait": 4.0}, run(parallel="data=2,pipeline=2"), "try more --parallel.microbatches, or --batch"),
        ({"reduce": 4.0}, run(parallel="tensor=2"), "--batch-size 128, for more work between exchanges"),
        ({"reduce": 2.0}, run("gossip"), "exchanging with others, waiting aside, takes 25% of the time"),
        ({"update": 3.0}, run("local"), "for fewer updates, or --strategy sync, whose workers share them"),
        ({"validation": 2.0}, run("easgd"), "takes 25% of the time: try --validate background"),
        ({"validation": 2.0}, run("sync", validation=0.2), "try --validation 0.05"),
        ({"checkpoint": 2.0}, run(checkpoint="5s"), "fewer checkpoints (--checkpoint is 5s), or more --ep"),
    ],
)
def test_the_largest_part_that_can_be_helped_is_named(stages: dict[str, float], one: Run, said: str) -> None:
    assert said in advice(ranks(**stages), *one)


@pytest.mark.parametrize(("strategy", "remedy"), [("sync", "speed"), ("easgd", "queue")])
def test_ranks_of_different_speeds_are_to_be_balanced(strategy: str, remedy: str) -> None:
    slow = {"forward": 4.0, "backward": 8.0, "samples": 600.0}
    found = ranks(slow, wait=6.0)
    slowest = "; rank 1 is the slowest: a sample takes it 2.0 times as long as the fastest"
    assert advice(found, *run(strategy)).endswith(f": try --balance {remedy}{slowest}")
    balanced = advice(found, *run(strategy, balance=remedy))
    assert "--balance" not in balanced
    assert balanced.endswith(slowest)
    assert "--balance" not in advice(ranks(wait=6.0), *run(strategy))


def test_a_slow_rank_is_named_even_where_nothing_stands_out() -> None:
    slow = {"forward": 3.0, "backward": 6.0, "samples": 600.0}
    said = advice(ranks(slow), *run("easgd"))
    assert said.startswith("nothing stands out: ")
    assert said.endswith("; rank 1 is the slowest: a sample takes it 1.5 times as long as the fastest")
    # Ranks that hold one model together compute parts of different sizes, and a server has no samples.
    assert "slowest" not in advice(ranks(slow), *run(parallel="pipeline=2"))
    assert "slowest" not in advice(ranks({"wait": 0.1}), *run("easgd"))


@pytest.mark.parametrize("stage", ["data", "copy", "wait", "reduce", "update", "validation", "checkpoint"])
@pytest.mark.parametrize("name", NAMES)
def test_every_option_that_is_advised_exists(
    name: str, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = advice(ranks(**{stage: 9.0}), *run(name)).replace(",", " ").replace(":", " ").split()
    for word in words:
        if word.startswith("--strategy."):
            known = STRATEGIES[name].__dataclass_fields__
            assert word.removeprefix("--strategy.").replace("-", "_") in known
        elif word.startswith("--"):
            assert word.removeprefix("--").replace("-", "_") in TrainConfig.__dataclass_fields__


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
    two, (config, pace) = record(rank, rank), run()
    assert where_the_time_went([], config, pace) == ""
    assert where_the_time_went([two, two], config, pace).startswith("waiting for others takes 50% of")
