"""Advice for a faster run, from its seconds by stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from tutti.records.run import STAGES, EpochRecord, by_rank
from tutti.records.stragglers import UNEVEN, Straggler, straggler

STANDS_OUT: Final = 0.1
"""The share of the time below which a stage is not worth a change."""

_SAYS: Final = {
    "extract": "waiting for the files of the data takes",
    "data": "getting the batches takes",
    "copy": "copying batches to the device, and to its precision and layout, takes",
    "wait": "waiting for others takes",
    "reduce": "exchanging with others, waiting aside, takes",
    "update": "moving the weights takes",
    "validation": "validation takes",
    "checkpoint": "saving takes",
}
"""Phrases for the stages with a remedy."""


def where_the_time_went(history: Sequence[EpochRecord], config: Mapping[str, Any], pace: str) -> str:
    """Advise a run by its epochs; "" if there are none."""
    ranks = stages_by_rank(history)
    if not ranks:
        return ""
    return advice(ranks, config, pace, straggler(by_rank(history)))


def advice(
    ranks: Sequence[Mapping[str, float]],
    config: Mapping[str, Any],
    pace: str,
    late: Straggler | None = None,
) -> str:
    """Name the largest part of the time with a remedy, the remedy, and a slow rank.

    Args:
        ranks: each rank's seconds by stage and its "samples", from `stages_by_rank`.
        config: of the run, as JSON values.
        pace: of its strategy; empty: unknown.
        late: the rank that the others wait for, if there is one.
    """
    totals = {stage: sum(rank.get(stage, 0.0) for rank in ranks) for stage in STAGES}
    whole = sum(totals.values())
    if not whole:
        return "no time was recorded"
    slowest = _slowest(ranks, config) if late is None else f"{late}: what else runs there?"
    named = f"; {slowest}" if slowest else ""
    worst = max(_SAYS, key=lambda stage: totals[stage])
    share = totals[worst] / whole
    way = {"together": "speed", "free": "queue"}.get(pace)
    if late is not None and worst != "wait" and way and config.get("balance", "none") == "none":
        named += f" --balance {way} gives it a smaller share"
    if share < STANDS_OUT:
        computing = (totals["forward"] + totals["backward"]) / whole
        return f"nothing stands out: forward and backward take {computing:.0%} of the time{named}"
    if worst == "wait" and slowest and way and config.get("balance", "none") == "none":
        remedy = f"--balance {way}"
    else:
        remedy = _remedy(worst, config, pace, len(ranks))
    return f"{_SAYS[worst]} {share:.0%} of the time: try {remedy}{named}"


def stages_by_rank(history: Sequence[EpochRecord]) -> list[dict[str, float]]:
    """Sum each rank's seconds by stage over the epochs, and its samples."""
    found = []
    for ranks in by_rank(history):
        totals = {stage: sum(rank.stages.get(stage, 0.0) for rank in ranks) for stage in STAGES}
        totals["samples"] = sum(rank.samples for rank in ranks)
        found.append(totals)
    return found


def _remedy(stage: str, config: Mapping[str, Any], pace: str, ranks: int) -> str:
    larger = 4 * int(config.get("batch_size", 32))
    if stage == "extract":
        return "a faster disk for the data, such as one of this machine's own"
    if stage == "data":
        return "the data as arrays, such as an NPZ file: they need no work for each sample"
    if stage == "copy":
        return f"--batch-size {larger}, or --layout contiguous and --precision fp32, which need no copy"
    if stage == "validation":
        if pace == "free" and config.get("validate", "pause") == "pause":
            return "--validate background, beside training"
        return f"--validation {config.get('validation', 0.1) / 4:g}, a smaller part of the samples"
    if stage == "checkpoint":
        taken = str(config.get("checkpoint", "off"))
        fewer = "" if taken == "off" else f"fewer checkpoints (--checkpoint is {taken}), or "
        return f"{fewer}more --epochs: the final weights are written once"
    if stage == "update":
        alone = pace in ("abreast", "free") and ranks > 1
        shared = ", or --strategy sync, whose workers share them out" if alone else ""
        return f"--batch-size {larger}, for fewer updates{shared}"
    if config.get("parallel"):
        if "pipeline" in str(config["parallel"]):
            return f"more --parallel.microbatches, or --batch-size {larger}: both make the bubble smaller"
        return f"--batch-size {larger}, for more work between exchanges"
    return f"--batch-size {larger}, or a strategy whose workers exchange less often, such as local"


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
