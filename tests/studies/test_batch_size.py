"""Where the doubling of the batch ends: with a clock, speeds and a memory made up."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tutti.errors import BadModel
from tutti.run.config import TrainConfig
from tutti.studies.autotune.batch_size import Ladder, Memory, climb, first_batch, largest, with_batch
from tutti.studies.autotune.candidates import Candidate
from tutti.studies.autotune.race import Timing

GIB = 1 << 30
FIRST = Candidate(2, 1, "fp32", "contiguous", 32)


@dataclass
class Machine:
    """A step takes `fixed_s`, and `sample_s` for each sample; memory grows by `sample_bytes` for each."""

    fixed_s: float = 0.01
    sample_s: float = 1e-4
    sample_bytes: int = 0
    unfit: int = 1 << 30
    now: float = 0.0
    largest: int = 0
    sizes: list[int] = field(default_factory=list)

    def measure(self, one: Candidate, steps: int) -> Timing:
        if one.batch_size >= self.unfit:
            raise BadModel("it is too large")
        self.largest = max(self.largest, one.batch_size)
        self.sizes.append(one.batch_size)
        # Others take half of the machine every now and then: turns that alternate do not mind.
        seconds = steps * (self.fixed_s + self.sample_s * one.batch_size) * (2 if self.now % 4 > 2 else 1)
        self.now += seconds
        return Timing(steps, steps * one.batch_size, seconds)

    def memory(self) -> Memory:
        return Memory(GIB + self.largest * self.sample_bytes, 4 * GIB)

    def climb(self, most: int = 1 << 20, budget_s: float = 1000.0) -> Ladder:
        return climb(FIRST, most, self.measure, lambda: self.now, self.now + budget_s, self.memory)


def test_the_batch_doubles_until_that_gains_less_than_a_tenth() -> None:
    # samples/s: 2424 3902 5614 7191 8366 9110: + 61, 44, 28, 16, 9 percent
    found = Machine().climb()
    assert [rung.candidate.batch_size for rung in found.rungs] == [32, 64, 128, 256, 512, 1024]
    assert found.pick == 512
    assert "batch 512: " in found.why()
    assert "1024 gains 9%, and a doubling is to gain 10%; it trains differently from a batch" in found.why()
    assert found.why().endswith("1/16 of the updates in an epoch: compare the accuracy")


def test_a_batch_that_fills_the_machine_is_not_doubled() -> None:
    found = Machine(fixed_s=0.0).climb()
    assert (found.pick, len(found.rungs)) == (32, 2)
    assert found.why().endswith("64 gains 0%, and a doubling is to gain 10%")


def test_an_epoch_keeps_its_updates() -> None:
    found = Machine().climb(most=largest(1290))
    assert (found.pick, found.ended) == (128, "256 would leave an epoch fewer than 10 updates")


def test_memory_is_foreseen_before_it_is_taken() -> None:
    # 64 took 32 x 10 MiB more than 32, in each of two ranks; 128 would take twice that, 256 four times.
    machine = Machine(sample_bytes=10 << 20)
    found = machine.climb()
    assert found.pick == max(machine.sizes) == 128
    assert found.ended == "256 would take more than half of the 4.0 GiB that are free"


def test_a_batch_that_does_not_fit_ends_it() -> None:
    found = Machine(unfit=128).climb()
    assert (found.pick, found.ended) == (64, "128 does not fit: it is too large")


def test_no_size_begins_that_would_end_late() -> None:
    machine = Machine()
    found = machine.climb(budget_s=3.0)
    assert machine.now <= 3.0
    assert (found.pick, found.ended) == (64, "no time was left for 128")


def test_the_first_batch_has_a_sample_for_each_rank() -> None:
    assert [first_batch(ranks) for ranks in (1, 32, 33, 96)] == [32, 32, 64, 128]


@pytest.mark.parametrize("name", ["linear_scaling", "LinearScalingLR"])
def test_linear_scaling_follows_the_batch(name: str) -> None:
    config = TrainConfig(schedule=name, schedule_options={"warmup": 9}, lr=0.1)
    found = with_batch(config, 256)
    assert (found.batch_size, found.lr) == (256, 0.1)
    assert found.schedule_options == {"warmup": 9, "factor": 8.0}
    assert config.schedule_options == {"warmup": 9}


def test_a_factor_that_is_given_and_another_schedule_stay() -> None:
    given = TrainConfig(schedule="linear_scaling", schedule_options={"factor": 2})
    assert with_batch(given, 256).schedule_options == {"factor": 2}
    assert with_batch(TrainConfig(schedule="one_cycle"), 256).schedule_options == {}
