"""The batch and the learning rate of a run that goes on with fewer or more workers. No torch.

    keep-batch   B' = B                         lr' = lr
    scale        B' = B workers' / workers      lr' = lr B' / B

Source of the linear rule: Goyal et al. 2017, "Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour",
arXiv:1706.02677, section 2.1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from tutti.errors import BadOption
from tutti.load_object import names_object
from tutti.run.config import SCALE, TrainConfig
from tutti.run.train_job import TrainJob

ONE_BATCH: Final = frozenset({"auto", "paramserver", "solo", "sync"})
"""Strategies whose workers share the batch of an update; to ask themselves would import torch."""


def resized(job: TrainJob, first: TrainConfig, before: int, workers: int) -> TrainJob:
    """Return a job for another number of workers.

    Args:
        job: that of the last ones.
        first: the configuration that the run was begun with.
        before: its workers.
        workers: those that go on.

    Raises:
        BadOption: the ranks hold one model together.
    """
    if first.parallel is not None and workers != before:
        raise BadOption(
            f"a run with --parallel {first.parallel} goes on with {before} ranks only, which hold its model"
        )
    config = job.config.changed({"workers": str(workers)})
    if first.on_shrink != SCALE:
        more = first.steps is not None and not _share_batch(job, workers)
        return replace(job, config=replace(config, steps=_steps(first, workers, before)) if more else config)
    batch_size = max(workers, round(first.batch_size * workers / before))
    steps = _steps(first, batch_size, first.batch_size)
    config = replace(config, batch_size=batch_size, steps=steps)
    return replace(job, config=config, lr_scale=batch_size / first.batch_size)


def _steps(first: TrainConfig, share: int, whole: int) -> int | None:
    """The steps in which as many samples are trained on as in those that were asked for at first.

    Args:
        first: says how many these are; None: epochs are asked for.
        share: the size of a step, in samples or workers.
        whole: that of a step at first.
    """
    return None if first.steps is None else -(-first.steps * whole // share)


def _share_batch(job: TrainJob, workers: int) -> bool:
    """Tell whether the workers of a job make each update together."""
    strategy = job.config.strategy
    if strategy in ONE_BATCH or not names_object(strategy):
        return strategy in ONE_BATCH
    from tutti.run.build import build_strategy  # It imports torch.
    from tutti.strategies.base import Pace

    return build_strategy(job, workers).pace is Pace.TOGETHER


def resized_text(job: TrainJob, first: TrainConfig) -> str:
    """Say what their batch and learning rate are; nothing where each worker has batches of its own.

    Args:
        job: theirs.
        first: the configuration that the run was begun with.
    """
    if first.strategy not in ONE_BATCH and first.on_shrink != SCALE:
        return ""
    if first.on_shrink != SCALE:
        return f", and batches of {first.batch_size:,} samples as before (--on-shrink keep-batch)"
    if job.config.batch_size == first.batch_size:
        return f", and batches of {first.batch_size:,} samples as at first (--on-shrink scale)"
    return (
        f", batches of {job.config.batch_size:,} samples, which were {first.batch_size:,} at first, and "
        f"{job.lr_scale:.4g} times the learning rate (--on-shrink scale)"
    )
