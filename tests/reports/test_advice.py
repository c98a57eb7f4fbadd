"""What is advised, from records with known times."""

from __future__ import annotations

from typing import Any

import pytest

from tutti.cli.main import main
from tutti.records.run import EpochRecord, Evaluation, RankRecord
from tutti.reports.advice import FREE, TOGETHER, advice, measuring_share, stages_by_rank
from tutti.run.config import TrainConfig
from tutti.strategies import STRATEGIES
from tutti.strategies.base import Pace

NAMES = tuple(STRATEGIES)


def ranks(*others: dict[str, float], **stages: float) -> list[dict[str, float]]:
    """Two ranks alike, with 6 seconds of computing each, unless more are given."""
    one = {"forward": 2.0, "backward": 4.0, "samples": 600.0, **stages}
    return [one, *(others or (one,))]


def config(strategy: str = "sync", **options: Any) -> dict[str, Any]:
    return {"strategy": strategy, "batch_size": 32, **options}


@pytest.mark.parametrize(
    ("stages", "settings", "said"),
    [
        ({"wait": 0.3, "reduce": 0.2}, {}, "nothing stands out: forward and backward take 92% of the time"),
        ({"data": 4.0}, {}, "getting the batches takes 40% of the time: try the data as arrays"),
        ({"copy": 2.0}, {}, "takes 25% of the time: try --batch-size 128, or --layout contiguous"),
        (
            {"wait": 4.0},
            {},
            "waiting for others takes 40% of the time: try --batch-size 128, or --strategy e",
        ),
        (
            {"wait": 4.0},
            config(parallel="data=2,pipeline=2"),
            "try more --parallel.microbatches, or --batch-size",
        ),
        (
            {"reduce": 4.0},
            config(parallel="tensor=2"),
            "try --batch-size 128, for more work between exchanges",
        ),
        ({"wait": 4.0}, config("easgd"), "takes 40% of the time: try --strategy.every 40"),
        ({"wait": 4.0}, config("easgd", strategy_options={"every": 3}), ": try --strategy.every 12"),
        ({"wait": 4.0}, config("lazy"), ": try --strategy.slack 10"),
        ({"wait": 4.0}, config("hogwild"), ": try --batch-size 128, for fewer exchanges"),
        ({"reduce": 2.0}, config("gossip"), "exchanging with others, waiting aside, takes 25% of the time"),
        ({"reduce": 2.0}, config("downpour"), "try --strategy.push-every 4 --strategy.pull-every 4"),
        ({"reduce": 2.0}, config("gem"), "try --strategy easgd"),
        ({"update": 3.0}, config("solo"), "moving the weights takes 33% of the time: try --batch-size 128,"),
        ({"update": 3.0}, config("local"), "for fewer updates, or --strategy sync, whose workers share them"),
        ({"validation": 2.0}, config("easgd"), "takes 25% of the time: try --validate background"),
        ({"validation": 2.0}, config("easgd", validate="background"), "try --validation 0.025"),
        ({"validation": 2.0}, config("sync", validation=0.2), "try --validation 0.05"),
        ({"checkpoint": 2.0}, {}, "writing the weights takes 25% of the time: try more --epochs"),
    ],
)
def test_the_largest_part_that_can_be_helped_is_named(
    stages: dict[str, float], settings: dict[str, Any], said: str
) -> None:
    assert said in advice(ranks(**stages), settings or config())


@pytest.mark.parametrize(("strategy", "remedy"), [("sync", "speed"), ("easgd", "queue")])
def test_ranks_of_different_speeds_are_to_be_balanced(strategy: str, remedy: str) -> None:
    slow = {"forward": 4.0, "backward": 8.0, "samples": 600.0}
    found = ranks(slow, wait=6.0)
    assert f"--balance {remedy}, as a sample takes the slowest rank 2.0 times" in advice(
        found, config(strategy)
    )
    assert "--balance" not in advice(found, config(strategy, balance=remedy))
    assert "--balance" not in advice(ranks(wait=6.0), config(strategy))


@pytest.mark.parametrize("stage", ["data", "copy", "wait", "reduce", "update", "validation", "checkpoint"])
@pytest.mark.parametrize("name", NAMES)
def test_every_option_that_is_advised_exists(
    name: str, stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = advice(ranks(**{stage: 9.0}), config(name)).replace(",", " ").replace(":", " ").split()
    for word in words:
        if word.startswith("--strategy."):
            known = STRATEGIES[name].__dataclass_fields__
            assert word.removeprefix("--strategy.").replace("-", "_") in known
        elif word.startswith("--"):
            assert word.removeprefix("--").replace("-", "_") in TrainConfig.__dataclass_fields__


def test_the_strategies_are_told_apart_as_they_are() -> None:
    paces = {pace: {name for name in NAMES if STRATEGIES[name].pace is pace} for pace in Pace}
    assert set(FREE) == paces[Pace.FREE]
    assert {*TOGETHER, "solo"} == paces[Pace.TOGETHER]


def test_without_times_nothing_is_advised() -> None:
    assert advice([], config()) == "no time was recorded"
    assert measuring_share([]) == 0.0


def record(*ranks: RankRecord) -> EpochRecord:
    return EpochRecord(1, 8, True, Evaluation(1, 0.5), None, {"total": 1.0}, 1.0, 0.1, "now", list(ranks))


def test_stages_are_added_up_over_the_epochs_for_each_rank() -> None:
    first = RankRecord(samples=5, stages={"forward": 1.0, "wait": 0.5}, measuring_s=0.25)
    second = RankRecord(samples=7, stages={"forward": 2.0})
    one, other = stages_by_rank([record(first, second), record(first, second)])
    assert (one["forward"], one["wait"], one["samples"], one["measuring"]) == (2.0, 1.0, 10, 0.5)
    assert (other["forward"], other["wait"], other["samples"], other["measuring"]) == (4.0, 0.0, 14, 0.0)
    assert measuring_share([one, other]) == 0.5 / 7.0


def test_a_run_ends_with_the_advice(tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    assert main(["train", "mlp", "--data", "digits", "-n", "1", "--steps", "5", "--out", out]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("where the time went: ")
    assert "; measuring took 0." in last
