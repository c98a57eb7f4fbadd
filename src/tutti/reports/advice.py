"""Advice at the end of a run: how to train faster, keep the best weights, or find a rare class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tutti.parts import STRATEGIES
from tutti.records.run import STAGES, EpochRecord, Summary, by_rank
from tutti.records.stragglers import UNEVEN, Straggler, straggler

STANDS_OUT: Final = 0.2
"""A stage with a smaller share of the time is not worth a change."""

LOST_S: Final = 10.0
"""A stage with fewer seconds of each rank is not worth a change."""

RISE: Final = 0.05
"""The best epoch is named if the final validation loss is higher by this share."""

RARE: Final = 0.1
"""One of two classes is rare if it has a smaller share of the samples."""

_PHRASES: Final = {
    "extract": "waiting for the files of the data takes",
    "data": "getting the batches takes",
    "copy": "copying batches to the device, and to its precision and layout, takes",
    "wait": "waiting for others takes",
    "reduce": "exchanging with others takes",
    "update": "moving the weights takes",
    "validation": "validation takes",
    "checkpoint": "saving takes",
}
"""Phrases for the stages with a remedy."""


def where_the_time_went(history: Sequence[EpochRecord], config: Mapping[str, Any]) -> str:
    """Advise a run by the stages of its epochs; "" if a change would gain little."""
    ranks = stages_by_rank(history)
    return advice(ranks, config, straggler(by_rank(history))) if ranks else ""


def advice(
    ranks: Sequence[Mapping[str, float]], config: Mapping[str, Any], late: Straggler | None = None
) -> str:
    """Name the most expensive stage, the reason and the remedy; "" if a change would gain little.

    Args:
        ranks: the seconds of each rank by stage, and its "samples", from `stages_by_rank`.
        config: of the run, as JSON values.
        late: the rank that the others wait for, if there is one.
    """
    totals = {stage: sum(rank.get(stage, 0.0) for rank in ranks) for stage in STAGES}
    whole = sum(totals.values())
    worst = max(_PHRASES, key=lambda stage: totals[stage])
    lost, seconds = totals[worst] / len(ranks), whole / len(ranks)
    if lost < max(LOST_S, STANDS_OUT * seconds):
        return ""
    text = f"{_PHRASES[worst]} {lost:.0f} of {seconds:.0f} s"
    slowest = (_slowest(ranks, config) if late is None else str(late)) if worst == "wait" else None
    if slowest is not None:
        balanced = config.get("balance", "none") != "none"
        return f"{text}, as {slowest}: what else runs there?{'' if balanced else ' See also --balance'}"
    exchanged = totals["wait"] + totals["reduce"]
    if worst in ("wait", "reduce") and whole - exchanged <= seconds and not config.get("parallel"):
        return f"{text}, more than {len(ranks)} ranks gain: one would be no slower, try -n 1"
    samples = sum(rank.get("samples", 0.0) for rank in ranks)
    return f"{text}{_cause(worst, config, samples, whole, len(ranks))}: try {_remedy(worst, config)}"


def _cause(stage: str, config: Mapping[str, Any], samples: float, whole: float, ranks: int) -> str:
    """Return why a stage takes long; "": its name says it."""
    batch = int(config.get("batch_size", 32))
    if stage in ("wait", "reduce") and "pipeline" not in str(config.get("parallel")) and samples:
        each_ms = 1000 * batch * whole / samples / ranks
        return f", as {ranks} ranks meet every {batch} samples ({each_ms:,.1f} ms)"
    if stage in ("data", "update"):
        return f", as there are {samples / batch:,.0f} batches of {batch} samples"
    return ""


def stages_by_rank(history: Sequence[EpochRecord]) -> list[dict[str, float]]:
    """Sum the seconds of each rank by stage over the epochs, and its samples."""
    return [
        {
            **{stage: sum(rank.stages.get(stage, 0.0) for rank in ranks) for stage in STAGES},
            "samples": sum(rank.samples for rank in ranks),
        }
        for ranks in by_rank(history)
    ]


def rare_class(summary: Summary, labels: Sequence[str], config: Mapping[str, Any]) -> str:
    """Advise a run that recognises less than half of a rare class (of two) in its test or validation part."""
    judged = summary.test or summary.validation
    rows = [] if judged is None else judged.confusion or []
    if judged is None or len(rows) != 2 or config.get("class_weights") or config.get("sampling"):
        return ""
    rare, there = min(enumerate(map(sum, rows)), key=lambda pair: pair[1])
    found = rows[rare][rare]
    if there >= RARE * sum(map(sum, rows)) or 2 * found >= there:
        return ""
    best = ", and --restore-best --monitor val_balanced_accuracy"
    return (
        f"class {labels[rare] if labels else rare} is rare, and {found:,} of its {there:,} samples were "
        "found: try --class-weights balanced or --sampling balanced"
        + (best if "balanced_accuracy" in judged.metrics else "")
    )


def past_the_best(history: Sequence[EpochRecord], config: Mapping[str, Any]) -> str:
    """Advise a run whose validation loss rose after its best epoch."""
    losses = {one.epoch: one.validation.loss for one in history if one.validation is not None}
    best, last = min(losses, key=losses.__getitem__, default=0), max(losses, default=0)
    if config.get("restore_best") or not losses or losses[last] <= losses[best] + RISE * abs(losses[best]):
        return ""
    ends = "" if config.get("patience") else f", --patience {min(last - best, 3)} ends the run sooner"
    return (
        f"the validation loss rose from {losses[best]:.3g} in epoch {best} to {losses[last]:.3g}: "
        f"--restore-best keeps the weights of epoch {best}{ends}"
    )


def _remedy(stage: str, config: Mapping[str, Any]) -> str:
    larger = f"--batch-size {4 * int(config.get('batch_size', 32))}"
    taken, parallel = str(config.get("checkpoint", "off")), str(config.get("parallel"))
    fewer = "" if taken == "off" else f"fewer checkpoints (--checkpoint is {taken}), or "
    remedies = {
        "extract": "a faster disk for the data, such as a local one",
        "data": f"{larger}, for fewer batches" + (", or less --augment" if config.get("augment") else ""),
        "copy": f"{larger}, or --layout contiguous and --precision fp32, which need no copy",
        "validation": (
            f"--validate background, or --validation {config.get('validation', 0.1) / 4:g}, fewer samples"
        ),
        "checkpoint": f"{fewer}more --epochs: the final weights are written once",
        "update": f"{larger}, for fewer updates",
    }
    if stage in remedies:
        return remedies[stage]
    if "pipeline" in parallel:
        return f"more --parallel.microbatches, or {larger}: both make the bubble smaller"
    strategy = str(config.get("strategy"))
    if strategy in STRATEGIES and "every" in STRATEGIES.options(strategy):
        return "a larger --strategy.every, for fewer exchanges"
    other = "" if config.get("parallel") else ", or a strategy with fewer of them, such as easgd or local"
    return f"{larger}, for more work between exchanges{other}"


def _slowest(ranks: Sequence[Mapping[str, float]], config: Mapping[str, Any]) -> str | None:
    """Name the slowest rank, if ranks differ in speed and each computes the whole model."""
    taken = {
        (rank.get("forward", 0.0) + rank.get("backward", 0.0)) / rank["samples"]: number
        for number, rank in enumerate(ranks)
        if rank.get("samples")
    }
    most, least = max(taken, default=0.0), min(taken, default=0.0)
    if config.get("parallel") or not least or most / least < UNEVEN:
        return None
    ratio = most / least
    return f"rank {taken[most]} is the slowest: a sample takes it {ratio:.1f} times as long as the fastest"
