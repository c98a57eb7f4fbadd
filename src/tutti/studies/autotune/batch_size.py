"""The batch size at the knee of throughput: doubled while that gains enough, and fits. Needs no torch.

    32 ▸ 64: + 71%   64 ▸ 128: + 34%   128 ▸ 256: + 4%, less than 10%: 128

Each size and its double train in turn and are compared turn by turn, as in a race.

Source: Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour", arXiv:1706.02677,
section 2.1, for the learning rate that another batch needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from tutti.errors import UserError
from tutti.run.config import TrainConfig
from tutti.strategies.base import LEAST_UPDATES
from tutti.studies.autotune.candidates import Candidate
from tutti.studies.autotune.race import Contender, Fate, Measure, gap

SMALLEST: Final = 32
"""The first size: the default, for which a learning rate is taken to be right."""

GAIN: Final = 0.10
"""Gain in samples per second that doubling the batch must bring."""

TURNS: Final = 3
"""Repetitions of measuring a size and its double."""

TURN_S: Final = 0.2
"""Seconds of such a turn."""

HALF: Final = 0.5
"""The share of the free memory that a batch may take: the rest is for what comes later, and for others."""


@dataclass(frozen=True)
class Memory:
    """The memory of a host, or of a GPU, as one of its ranks sees it.

    Attributes:
        used: the most that the rank has used so far, in bytes.
        free: bytes that are available now.
    """

    used: int
    free: int


@dataclass(frozen=True)
class Ladder:
    """The batch sizes that were measured.

    Attributes:
        rungs: each twice the one before. The last one but one is the pick if the last one gained too little.
        ended: why it ended.
        taken: the number of the pick among the rungs.
    """

    rungs: Sequence[Contender[Candidate]]
    ended: str
    taken: int

    @property
    def pick(self) -> int:
        """The batch size to take."""
        return self.rungs[self.taken].candidate.batch_size

    def why(self) -> str:
        """Say what was picked, why no more, and what that means."""
        least, speeds = self.rungs[0].candidate, [f"{rung.rate or 0:,.0f}" for rung in self.rungs]
        said = f"batch {self.pick}: {speeds[self.taken]} samples/s on {least.shape}; {self.ended}"
        if self.taken == 0:
            return said
        return (
            f"{said}; it trains differently from a batch of {least.batch_size} ({speeds[0]} samples/s), with "
            f"1/{self.pick // least.batch_size} of the updates in an epoch: compare the accuracy"
        )


def first_batch(ranks: int) -> int:
    """Return the first size to measure: the default, or the power of two with a sample for each rank."""
    return max(SMALLEST, 1 << (ranks - 1).bit_length())


def largest(samples: int) -> int:
    """Return the largest batch that leaves an epoch enough updates."""
    return max(1, samples // LEAST_UPDATES)


def climb(
    first: Candidate,
    most: int,
    measure: Measure[Candidate],
    clock: Callable[[], float],
    deadline: float,
    memory: Callable[[], Memory],
) -> Ladder:
    """Double the batch while that gains enough.

    Args:
        first: the way to train, with the first batch.
        most: no batch is larger.
        measure: makes some steps.
        clock: seconds.
        deadline: when, by that clock, no size may begin.
        memory: of now.

    Raises:
        UserError: not even the first batch can be trained.
    """
    before = memory().used
    rungs = [_begun(first, measure)]
    measure_turn(rungs[0], 0, measure)
    while True:
        last, now = rungs[-1], memory()
        size, grown = 2 * last.candidate.batch_size, max(0, now.used - before)
        before = now.used
        ended = None
        if size > most:
            ended = f"{size} would leave an epoch fewer than {LEAST_UPDATES} updates"
        elif 2 * grown * first.ranks > HALF * now.free:
            ended = f"{size} would take more than half of the {now.free / 2**30:.1f} GiB that are free"
        elif clock() + 2 * (TURNS + 1) * max(TURN_S, 2 * last.step_s) > deadline:
            ended = f"no time was left for {size}"
        if ended is not None:
            return Ladder(rungs, ended, len(rungs) - 1)
        try:
            rung = _begun(replace(first, batch_size=size), measure)
        except UserError as error:
            return Ladder(rungs, f"{size} does not fit: {error}", len(rungs) - 1)
        for turn in range(1, TURNS + 1):
            measure_turn(last, turn, measure)
            measure_turn(rung, turn, measure)
        rungs.append(rung)
        gain = gap(rung, last).ratio - 1
        if gain < GAIN:
            worth = f"gains {gain:.0%}" if gain >= 0 else f"loses {-gain:.0%}"
            return Ladder(rungs, f"{size} {worth}, and a doubling is to gain {GAIN:.0%}", len(rungs) - 2)


def _begun(candidate: Candidate, measure: Measure[Candidate]) -> Contender[Candidate]:
    """Make its first step, which sets up memory, and a second one, which says how long they take."""
    rung = Contender(candidate, Fate.RACING)
    rung.first = measure(candidate, 1)
    rung.note(measure(candidate, 1))
    return rung


def measure_turn(rung: Contender[Candidate], turn: int, measure: Measure[Candidate]) -> None:
    """Have a size train for a moment."""
    timing = measure(rung.candidate, max(1, round(TURN_S / max(rung.step_s, 1e-9))))
    rung.turns[turn] = timing.rate
    rung.note(timing)


def with_batch(config: TrainConfig, size: int) -> TrainConfig:
    """Return the configuration with another batch, for which a schedule `linear_scaling` gets its factor."""
    options = dict(config.schedule_options)
    if config.schedule is not None and re.sub(r"[^a-z]", "", config.schedule.lower()).removesuffix("lr") == (
        "linearscaling"
    ):
        options.setdefault("factor", size / SMALLEST)
    return replace(config, batch_size=size, schedule_options=options)
