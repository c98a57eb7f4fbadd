"""The checks of a job that need neither its ranks nor its data: names, options, and the number of ranks.

The launching process makes them first, if it has torch. The ranks make them too: where an MPI launcher
started them, nobody else has.
"""

from __future__ import annotations

import torch
from torch import nn

from tutti import models, optim
from tutti.data.batches import check_split
from tutti.data.sources import check_word
from tutti.load_object import names_object
from tutti.optim.schedules import check_schedule
from tutti.run.build import build_strategy
from tutti.run.compatibility import check_pairing
from tutti.run.jobs import Job, layout_of
from tutti.strategies import Strategy
from tutti.strategies.base import Pace
from tutti.training.losses import LOSSES
from tutti.training.metrics import check_metrics


def check_job(job: Job, ranks: int, hosts: int = 1) -> None:
    """Refuse what no rank and no data could mend.

    Args:
        job: what is to be done.
        ranks: how many there are to be, servers included.
        hosts: on how many hosts.

    Raises:
        UserError: a name or an option is wrong, or the job does not fit these ranks.
    """
    check_names(job)
    if job.trains:
        check_strategy(job, ranks, hosts)


def check_strategy(job: Job, ranks: int, hosts: int) -> Strategy:
    """Return the strategy of a job, which fits its ranks and its other options.

    Args:
        job: what is to be done.
        ranks: how many there are, servers included.
        hosts: on how many hosts.

    Raises:
        UnknownName: there is no such strategy, or it has no such hyper-parameter.
        BadOption: it cannot use these ranks or an option, or the batch has fewer samples than they are.
    """
    config = job.config
    layout = layout_of(config, ranks)
    workers = ranks - config.servers if layout is None else layout.data
    strategy = build_strategy(job, workers, hosts, config.servers)
    check_pairing(strategy, config, job.compared)
    if strategy.pace is Pace.TOGETHER:
        check_split(config.batch_size, workers)
    return strategy


def check_names(job: Job) -> None:
    """Refuse names that stand for nothing. What names an object of the user's is not loaded.

    Raises:
        UnknownName: a name, or an option of the optimizer, is unknown.
        BadOption: an option of the optimizer has a value that it refuses.
    """
    config = job.config
    if config.hosts is None and "data" not in job.objects and not names_object(config.data):
        # Other hosts have files of their own.
        check_word(config.data)
    for field, check in (
        ("model", models.MODELS.check),
        ("loss", _check_loss),
        ("metrics", check_metrics),
        ("schedule", check_schedule),
    ):
        name = getattr(config, field)
        if name is not None and field not in job.objects and not names_object(name):
            check(name)
    if "optimizer" not in job.objects and not names_object(config.optimizer):
        # An optimizer checks its options when it is made; some take matrices alone.
        matrix = nn.Parameter(torch.zeros(2, 2))
        optim.build(config.optimizer, [matrix], config.lr, config.optimizer_options)


def _check_loss(name: str) -> None:
    if name != "auto":
        LOSSES.check(name)
