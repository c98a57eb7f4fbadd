"""Advice for a faster run, from its seconds by stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tutti.records.run import STAGES, EpochRecord

STANDS_OUT: Final = 0.1
"""The share of the time below which a stage is not worth a change."""

UNEVEN: Final = 1.25
"""The ratio of the ranks' times of a sample from which on they differ in speed."""

TOGETHER: Final = ("sync", "paramserver")
"""Strategies whose workers make each update together."""

FREE: Final = ("adpsgd", "downpour", "easgd", "gem", "hogwild", "lazy")
"""Strategies whose workers wait for no other."""

_SAYS: Final = {
    "data": "getting the batches takes",
    "copy": "copying batches to the device, and to its precision and layout, takes",
    "wait": "waiting for others takes",
    "reduce": "exchanging with others, waiting aside, takes",
    "update": "moving the weights takes",
    "validation": "validation takes",
    "checkpoint": "writing the weights takes",
}
"""Phrases for the stages that something can be done about."""

_RARER: Final = {
    "sync": "--batch-size {larger}, or --strategy easgd, whose workers meet every 10 batches",
    "paramserver": "--batch-size {larger}, or --strategy easgd, whose workers meet every 10 batches",
    "local": "--strategy.every {every}",
    "diloco": "--strategy.every {every}",
    "easgd": "--strategy.every {every}",
    "easgd_sync": "--strategy.every {every}",
    "gossip": "--strategy.every {every}",
    "adpsgd": "--strategy.every {every}",
    "downpour": "--strategy.push-every 4 --strategy.pull-every 4, or --strategy easgd",
    "lazy": "--strategy.slack 10, or --strategy easgd",
    "gem": "--strategy easgd, whose workers meet every 10 batches",
}
"""Options for fewer exchanges, by strategy."""

_EVERY: Final = {"local": 8, "diloco": 20, "easgd": 10, "easgd_sync": 10, "gossip": 1, "adpsgd": 1}
"""Batches between two exchanges by default, by strategy."""


def advice(ranks: Sequence[Mapping[str, float]], config: Mapping[str, Any]) -> str:
    """Name the largest part of the time that something can be done about, and what to try, in one sentence.

    Args:
        ranks: each rank's seconds by stage, as `stages_by_rank` gives them; "samples" among them.
        config: of the run, as JSON values: its strategy, strategy_options, batch_size, validate, balance and
            parallel.
    """
    totals = {stage: sum(rank.get(stage, 0.0) for rank in ranks) for stage in STAGES}
    whole = sum(totals.values())
    if not whole:
        return "no time was recorded"
    worst = max(_SAYS, key=lambda stage: totals[stage])
    share = totals[worst] / whole
    if share < STANDS_OUT:
        computing = (totals["forward"] + totals["backward"]) / whole
        return f"nothing stands out: forward and backward take {computing:.0%} of the time"
    return f"{_SAYS[worst]} {share:.0%} of the time: try {_remedy(worst, ranks, config)}"


def stages_by_rank(history: Sequence[EpochRecord]) -> list[dict[str, float]]:
    """Sum each rank's seconds by stage over all epochs, with those of measuring, and its samples."""
    found = []
    for ranks in zip(*(record.ranks for record in history), strict=False):
        totals = {stage: sum(rank.stages.get(stage, 0.0) for rank in ranks) for stage in STAGES}
        totals["measuring"] = sum(rank.measuring_s for rank in ranks)
        totals["samples"] = sum(rank.samples for rank in ranks)
        found.append(totals)
    return found


def measuring_share(ranks: Sequence[Mapping[str, float]]) -> float:
    """Return the share of the time that measuring it took, in [0, 1]."""
    whole = sum(rank.get(stage, 0.0) for rank in ranks for stage in STAGES)
    return sum(rank.get("measuring", 0.0) for rank in ranks) / whole if whole else 0.0


def _remedy(stage: str, ranks: Sequence[Mapping[str, float]], config: Mapping[str, Any]) -> str:
    strategy = str(config.get("strategy", ""))
    larger = 4 * _whole(config.get("batch_size"), 32)
    if stage == "data":
        return "the data as arrays, such as an NPZ file: they need no work for each sample"
    if stage == "copy":
        return f"--batch-size {larger}, or --layout contiguous and --precision fp32, which need no copy"
    if stage == "validation":
        return _for_validation(strategy, config)
    if stage == "checkpoint":
        return "more --epochs: weights are written once, at the end"
    if stage == "update":
        lighter = f"--batch-size {larger}, for fewer updates"
        shares = strategy in ("solo", *TOGETHER)
        return lighter if shares else f"{lighter}, or --strategy sync, whose workers share them out"
    if config.get("parallel"):
        return _for_portions(str(config["parallel"]), larger)
    balance = _for_balance(strategy, ranks, config)
    return balance if stage == "wait" and balance else _rarer(strategy, larger, config)


def _for_validation(strategy: str, config: Mapping[str, Any]) -> str:
    if strategy in FREE and config.get("validate", "pause") == "pause":
        return "--validate background, beside training"
    return f"--validation {_share(config.get('validation'), 0.1) / 4:g}, a smaller part of the samples"


def _for_balance(
    strategy: str, ranks: Sequence[Mapping[str, float]], config: Mapping[str, Any]
) -> str | None:
    """Advise a balance, if ranks differ in speed and none is chosen yet."""
    computing = [
        (rank.get("forward", 0.0) + rank.get("backward", 0.0), rank.get("samples")) for rank in ranks
    ]
    paces = [seconds / samples for seconds, samples in computing if seconds > 0 and samples]
    if config.get("balance", "none") != "none" or not paces or max(paces) < UNEVEN * min(paces):
        return None
    ratio = f"a sample takes the slowest rank {max(paces) / min(paces):.1f} times as long as the fastest"
    if strategy in TOGETHER:
        return f"--balance speed, as {ratio}"
    return f"--balance queue, as {ratio}" if strategy in FREE else None


def _for_portions(layout: str, larger: int) -> str:
    """Advise ranks that hold one model together: each needs the others' results."""
    if "pipeline" in layout:
        return f"more --parallel.microbatches, or --batch-size {larger}: both make the bubble smaller"
    return f"--batch-size {larger}, for more work between exchanges"


def _rarer(strategy: str, larger: int, config: Mapping[str, Any]) -> str:
    options = config.get("strategy_options")
    given = options.get("every") if isinstance(options, Mapping) else None
    every = 4 * _whole(given, _EVERY.get(strategy, 1))
    known = _RARER.get(strategy, "--batch-size {larger}, for fewer exchanges")
    return known.format(larger=larger, every=every)


def _whole(value: object, usual: int) -> int:
    """Return a whole number above 0 of a configuration; the usual one if there is none."""
    return value if isinstance(value, int) and value > 0 else usual


def _share(value: object, usual: float) -> float:
    """Return a share of a configuration, in [0, 1]; the usual one if there is none."""
    return float(value) if isinstance(value, int | float) and 0 <= value <= 1 else usual
