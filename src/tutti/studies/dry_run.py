"""A dry run: the plan of a run and its full configuration. Runs on one rank."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from tutti.comm.base import Communicator
from tutti.exports.sources import load_from
from tutti.model_parallel.layout import portion_of
from tutti.records.json_lines import to_json_lines
from tutti.run import summary_lines
from tutti.run.build import Task, assemble, open_config_data, prepare_task, resolved, seeded
from tutti.run.checks import check_recipe
from tutti.run.jobs import load_job
from tutti.run.optimization import build_optimizer
from tutti.run.restore import found_by, load_model, refuse_shorter, saved_for
from tutti.strategies import Solo
from tutti.strategies.base import Pace
from tutti.studies.dry_run_job import DryRunJob


def work(comm: Communicator, payload: bytes) -> None:
    """Print the plan of the run (entry point)."""
    job = load_job(payload, DryRunJob)
    planned, config, placement = job.planned, job.planned.config, job.ranks
    strategy = check_recipe(planned, placement.ranks, max(1, len(placement.hosts)))
    with seeded(config.seed):
        task = prepare_task(job, open_config_data(job, comm))
        filled = resolved(config, comm, task, strategy, build_optimizer(job, task.module))
        _assemble(job, comm, task)
    threads = placement.threads or config.threads or torch.get_num_threads()
    final = replace(filled, workers=str(placement.workers), threads=threads)
    print(
        task.described(), summary_lines.training(final, strategy.pace is Pace.TOGETHER), sep="\n", flush=True
    )
    if job.file is not None:
        Path(job.file).write_text(to_json_lines(final.as_json()), encoding="utf-8")


def _assemble(job: DryRunJob, comm: Communicator, task: Task) -> None:
    """Build all parts of the run for one rank: this checks that their options go together."""
    alone, saved = Solo(), None
    resume = job.planned.resume
    # One rank cannot load a part of a model.
    divided = job.planned.config.parallel is not None
    checkpoint = None if resume is None or divided else found_by(comm, resume)
    if checkpoint is not None:
        saved = saved_for(checkpoint, comm, alone, job.config, task.dataset)
        load_model(task.module, saved)
    elif job.config.weights is not None:
        load_from(Path(job.config.weights), task.module, comm.rank == 0)
    whole = portion_of(None, comm, task.module, task.workload(job.config.batch_size), alone)
    with closing(whole) as portion:
        parts = assemble(job, comm, task, alone, portion, saved)
        if checkpoint is not None and saved is not None:
            refuse_shorter(checkpoint, saved, parts.schedule)
