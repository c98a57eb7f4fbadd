"""What a run would be: its plan, the memory of its ranks, and its configuration. Runs on one rank.

The memory is an estimate: a model without contents is taken through a step (`tutti.model_parallel.memory`).
Allocators keep more than they give, and libraries have buffers, so a run may use more.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Final

import psutil
import torch

from tutti.comm.base import Communicator
from tutti.exports.sources import load_from
from tutti.launch.placement import RANK_BYTES, Placement
from tutti.model_parallel.layout import Layout, portion_of
from tutti.model_parallel.memory import MemoryNeed, held, on_meta, peak_of_step, state_per_byte
from tutti.parameter_server.base import Centre
from tutti.records.json_lines import to_json_lines
from tutti.run import summary_lines
from tutti.run.build import (
    Task,
    assemble,
    open_config_data,
    prepare_task,
    resolved,
    seeded,
)
from tutti.run.checks import check_job, check_predictions
from tutti.run.config import TrainConfig
from tutti.run.jobs import layout_of, load_job
from tutti.run.optimization import build_optimizer
from tutti.run.restore import found_by, load_model, refuse_shorter, saved_for
from tutti.strategies import Solo, Strategy
from tutti.strategies.base import Home, Pace
from tutti.studies.dry_run_job import DryRunJob
from tutti.studies.layouts import need_of

MB: Final = 1e6


def work(comm: Communicator, payload: bytes) -> dict[str, float]:
    """Print what the run would be (entry point).

    Args:
        comm: one rank.
        payload: a pickled `DryRunJob`.

    Returns:
        The bytes of each kind of memory, of all ranks of a host together.

    Raises:
        UserError: the input is wrong.
    """
    job = load_job(payload, DryRunJob)
    planned, config, placement = job.planned, job.planned.config, job.ranks
    hosts = max(1, len(placement.hosts))
    strategy = check_job(planned, placement.ranks, hosts)
    with seeded(config.seed):
        dataset = open_config_data(job, comm)
        task = prepare_task(job, dataset)
        check_predictions(config, task.dataset)
        optimizer = build_optimizer(job, task.module)
        state = state_per_byte(lambda module: build_optimizer(job, module))
        layout = layout_of(config, placement.workers)
        need = _need(task, strategy, config, layout, placement.workers, state)
        found = _of_host(need, task, strategy, placement)
        filled = resolved(config, comm, task, strategy, optimizer)
        _assemble(job, comm, task)
    final = replace(
        filled,
        workers=str(placement.workers),
        threads=placement.threads or config.threads or torch.get_num_threads(),
    )
    print(task.described(), summary_lines.training(final, strategy.pace is Pace.TOGETHER), sep="\n")
    print(_table(found, _ranks_of_host(placement)))
    print(f"configuration:\n{to_json_lines(final.as_json())}", end="", flush=True)
    return found


def _assemble(job: DryRunJob, comm: Communicator, task: Task) -> None:
    """Make all parts of the run for one rank, as only they know which of their options go together.

    Raises:
        UserError: a part cannot be made, or the checkpoint to go on from does not fit.
    """
    alone, saved = Solo(), None
    resume = job.planned.resume
    # One rank cannot take over a part of a model.
    divided = job.planned.config.parallel is not None
    checkpoint = None if resume is None or divided else found_by(comm, resume)
    if checkpoint is not None:
        saved = saved_for(checkpoint, comm, alone, job.config, task.dataset)
        load_model(task.module, saved)
    elif job.config.weights is not None:
        load_from(Path(job.config.weights), task.module, comm)
    whole = portion_of(None, comm, task.module, task.workload(job.config.batch_size))
    with closing(whole) as portion:
        parts = assemble(job, comm, task, alone, portion, saved)
        if checkpoint is not None and saved is not None:
            refuse_shorter(checkpoint, saved, parts.schedule)


def _need(
    task: Task, strategy: Strategy, config: TrainConfig, layout: Layout | None, workers: int, state: float
) -> MemoryNeed:
    """Return the need of the rank that needs the most."""
    workload = task.workload(config.batch_size)
    if layout is not None or (strategy.home is Home.SHARED and strategy.pace is Pace.TOGETHER):
        return need_of(layout, workers, task.module, workload, state)
    model = on_meta(task.module)
    weights, gradients = held(model)
    each = workers if strategy.pace is Pace.TOGETHER else 1
    peak = peak_of_step(model, workload, -(-config.batch_size // each))
    shared = workers if strategy.home is Home.SHARED else 1
    return MemoryNeed(weights // shared, gradients, int(state * gradients), peak)


def _of_host(need: MemoryNeed, task: Task, strategy: Strategy, placement: Placement) -> dict[str, float]:
    """Return the bytes of all ranks of the host with the most of them."""
    ranks = _ranks_of_host(placement)
    centre = task.nbytes if Centre in strategy.needs else 0
    return {
        "Python and torch": float(RANK_BYTES * ranks),
        "weights": float(need.weights * ranks + centre),
        "gradients": float(need.gradients * ranks),
        "optimizer state": float(need.state * ranks),
        "activations": float(need.activations * ranks),
        "data, once for all": float(task.dataset.nbytes),
    }


def _ranks_of_host(placement: Placement) -> int:
    return max((host.ranks for host in placement.hosts_with_servers), default=placement.ranks)


def _table(found: dict[str, float], ranks: int) -> str:
    """Return the memory in lines, with the sum."""
    lines = [f"memory of a host, with {ranks} rank{'' if ranks == 1 else 's'}, about:"]
    rows = {**found, "in all": sum(found.values())}
    lines += [f"  {name:<20}{nbytes / MB:>10,.1f} MB" for name, nbytes in rows.items()]
    free = psutil.virtual_memory().available
    return "\n".join([*lines, f"  {'available here':<20}{free / MB:>10,.1f} MB"])
