"""The learning-rate range test: a short training with a rising rate, and the rate that its losses suggest.

After Smith 2015, "Cyclical Learning Rates for Training Neural Networks", arXiv:1506.01186, section 3.3.

    loss  ──────────╮
                     ╲              ╱
                      ╲____________╱
           rate ───────┼──────────┼────▶
             falls fastest      diverges
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from time import perf_counter
from typing import Final

from tutti.data.batches import Batches, Round
from tutti.training.batch_norm import normalising
from tutti.training.dropout import drawn_by_sample
from tutti.training.evaluation import Objective, Tally
from tutti.training.preflight import check_fit, check_smallest_batch
from tutti.training.run_parts import Schedule, Workers
from tutti.training.timers import RankWork
from tutti.training.update_gradient import UpdateGradient

SHARE: Final = 20
"""A test makes at most this fraction (1/20) of the run's updates."""

LEAST: Final = 20
MOST: Final = 100
"""The updates of a test."""

BELOW: Final = 0.01
RISE: Final = 1e5
"""The first rate of a test over the optimizer's default, and the ratio of the last to the first."""

SEEN: Final = 2.5
"""A fall of the loss counts from this many standard deviations of the batches' losses."""

STEPS: Final = (1.0, 2.0, 3.0, 5.0, 7.0)
"""The picks of each decade: few, so that rounding, which depends on the number of ranks, decides nothing."""


@dataclass(frozen=True)
class RangeTest:
    """A range test and its result."""

    rate: float | None  # the pick; None: take the optimizer's default rate
    why: str  # the result and its reason, in words
    rates: Sequence[float] = ()  # of the updates
    losses: Sequence[float] = ()  # of the updates' batches, before them
    smooth: Sequence[float] = ()  # the losses, each averaged with its neighbours, up to where they diverge


def rates_for(updates: int, first: float) -> list[float]:
    """Return the exponentially rising rates of the test of a run; none if it has too few updates."""
    number = min(MOST, updates // SHARE)
    return [first * RISE ** (at / (number - 1)) for at in range(number)] if number >= LEAST else []


def losses_of(
    workers: Workers, objective: Objective, batches: Batches, rates: Sequence[float]
) -> list[float]:
    """Make an update with each rate, until a loss or a gradient is not finite (collective).

    Return the losses of the updates' batches before them: means over all ranks, in float64, equal on all of
    them. The last one is inf if it, or the gradient, is not finite.
    """
    module, worker = workers.replica.module, workers.worker
    objective = check_fit(module, batches.part, objective, workers.comm.size > 1)
    module.train()
    check_smallest_batch(module, batches, workers.statistics is not None, objective.arithmetic)
    schedule = Schedule(batches, steps=len(rates), skip_nonfinite=1)
    gradient = UpdateGradient(workers, objective, schedule, RankWork(perf_counter, worker.traffic).stages)
    gradient.skipped.warned = True  # This end of the test is no fault.
    # A group with its own rate keeps it.
    groups = [group for group in workers.optimizer.param_groups if group["lr"] in rates[:1]]
    losses: list[float] = []
    with normalising(module, workers.statistics), drawn_by_sample(module, batches.seed) as gradient.masks:
        for rate, (made, passes) in zip(rates, _rounds(batches), strict=False):
            for group in groups:
                group["lr"] = rate
            epoch, tally = made // batches.updates, Tally(objective, matrix=False)
            samples, weight = gradient.add(passes, made, epoch, tally)
            usable = gradient.is_usable(passes, made, epoch, samples, weight)
            loss = tally.total(workers.comm).loss
            losses.append(loss if usable and math.isfinite(loss) else math.inf)
            if losses[-1] == math.inf:
                break
            worker.step()
    worker.finish()
    return losses


def _rounds(batches: Batches) -> Iterator[Round]:
    for epoch in count():
        yield from batches.epoch(epoch)


def pick(rates: Sequence[float], losses: Sequence[float], updates: int, adaptive: bool) -> RangeTest:
    """Pick the rate of a run from the losses of its range test; `rates` is empty if the run is too short.

    With an `adaptive` optimizer, whose step size does not follow the gradient's, it is the rate at which half
    of the loss's fall is made, where that is fastest. The steps of SGD grow with the gradient once the loss
    falls, and a test sees only the beginning of that; then it is a tenth of the rate at which the loss is
    lowest.
    """
    if not rates:
        few = f"5 % of the run's {updates:,} updates are {updates // SHARE}, and a range test needs {LEAST}"
        return RangeTest(None, f"learning rate: the optimizer's own, as {few}")
    smooth, head = _smooth(losses), losses[: len(rates) // 6]
    first = sum(head) / len(head)
    lowest, end = first, 0
    for loss in smooth:
        if not loss <= first + max(first - lowest, abs(first) / 10):
            break
        lowest, end = min(lowest, loss), end + 1
    if not end or (end == len(rates) and lowest == first):
        return RangeTest(
            None, "learning rate: the optimizer's own, as the loss of a range test follows no rate"
        )
    smooth, fall = smooth[:end], first - lowest
    diverges = f"up to {rates[-1]:.2g} it does not diverge"
    if end < len(rates):
        diverges = f"it diverges from {rates[end]:.2g} on"
    noise = math.sqrt(sum((loss - first) ** 2 for loss in head) / len(head))
    if fall <= SEEN * noise:
        rate = _rounded(rates[end - 1] / 2)
        why = f"half of {rates[end - 1]:.2g}; the loss does not fall in so few updates, and {diverges}"
    elif adaptive:
        half = next(rate for rate, loss in zip(rates, smooth, strict=False) if loss <= first - fall / 2)
        rate = _rounded(half)
        why = f"the loss falls fastest there, and {diverges}"
    else:
        bottom = rates[smooth.index(lowest)]
        rate = _rounded(bottom / 10)
        why = f"a tenth of {bottom:.2g}, where the loss is lowest; {diverges}"
    return RangeTest(rate, f"learning rate {rate:g}: {why}", rates, losses, smooth)


def _smooth(losses: Sequence[float]) -> list[float]:
    """Return the means of losses with their neighbours."""
    reach = max(1, len(losses) // 20)
    near = [losses[max(0, at - reach) : at + reach + 1] for at in range(len(losses))]
    return [sum(some) / len(some) for some in near]


def _rounded(rate: float) -> float:
    """Return the pick nearest to a rate, by their ratio."""
    decade = math.floor(math.log10(rate))
    picks = [float(f"{step}e{power}") for power in (decade, decade + 1) for step in STEPS]
    return min(picks, key=lambda one: abs(math.log(one / rate)))


def drawing(test: RangeTest) -> str:
    """Draw the losses against the rates, with the pick, as SVG."""
    seen = [min(loss, _ceiling(test)) for loss in test.losses]
    low, high = min(seen), max(seen)
    lowest = math.log10(test.rates[0])

    def x(rate: float) -> float:
        return 60 + 540 * (math.log10(rate) - lowest) / math.log10(RISE)

    def y(loss: float) -> float:
        return 300 - 260 * (loss - low) / (high - low or 1)

    def text(x: float, y: float, words: str, anchor: str = "middle") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{words}</text>'

    marks = [
        f'<circle cx="{x(r):.1f}" cy="{y(one):.1f}" r="2.5"/>'
        for r, one in zip(test.rates, seen, strict=False)
    ]
    line = " ".join(f"{x(r):.1f},{y(one):.1f}" for r, one in zip(test.rates, test.smooth, strict=False))
    marks.append(f'<polyline points="{line}" fill="none" stroke="#f58518" stroke-width="2"/>')
    ticks = [10.0**power for power in range(math.ceil(lowest - 0.01), math.floor(lowest + 5.01) + 1)]
    marks += [text(x(tick), 325, f"{tick:g}") for tick in ticks]
    marks += [text(54, y(loss) + 4, f"{loss:.3g}", "end") for loss in (low, high)]
    marks += [text(330, 350, "learning rate"), text(330, 20, test.why)]
    if test.rate is not None:
        at = x(test.rate)
        marks.append(f'<path d="M{at:.1f} 40V300" stroke="#e45756" stroke-dasharray="4"/>')
    return (
        '<svg xmlns="http://www.w3.org/2000/svg" width="640" height="360" font-family="sans-serif" '
        'font-size="12"><rect width="640" height="360" fill="white"/><path d="M60 40V300H600" fill="none" '
        f'stroke="black"/><g fill="#4c78a8">{"".join(marks)}</g></svg>\n'
    )


def _ceiling(test: RangeTest) -> float:
    """Return the largest loss to draw unchanged: a loss that diverges would flatten the rest."""
    return 1.2 * max(test.smooth) if test.smooth else max(filter(math.isfinite, test.losses))
