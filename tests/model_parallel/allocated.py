"""How much memory a rank's tensors take while it trains: what torch's allocator hands out.

Runs on every rank. `tutti.model_parallel.memory` says so beforehand; this is what it is held against.
"""

from __future__ import annotations

import gc
import pickle
from typing import cast

from torch.profiler import ProfilerActivity, profile

from tutti.comm.base import Communicator
from tutti.model_parallel.layout import portion_of
from tutti.replica import local
from tutti.run.build import assemble, build_strategy, open_config_data, prepare_task, seeded
from tutti.run.config import TrainConfig
from tutti.run.jobs import layout_of
from tutti.run.train_job import TrainJob


def measure_all(comm: Communicator, payload: bytes) -> dict[str, list[int]]:
    """The bytes of each rank, for every run (entry point of the ranks).

    Args:
        comm: all ranks.
        payload: pickled runs by name: the fields of their `TrainConfig`.
    """
    found: dict[str, list[int]] = {}
    for name, config in pickle.loads(payload).items():
        job = TrainJob(TrainConfig.from_json(config), quiet=True, write=False)
        found[name] = cast("list[int]", comm.all_gather_objects(measure(comm, job)))
    return found


def measure(comm: Communicator, job: TrainJob) -> int:
    """The bytes of this rank's tensors at the peak of its training: its own, and the samples of a batch."""
    config = job.config
    with seeded(config.seed):
        layout = layout_of(config, comm.size)
        strategy = build_strategy(job, comm.size if layout is None else layout.data, 1)
        task = prepare_task(job, open_config_data(job, comm))
        portion = portion_of(layout, comm, task.module, task.workload(config.batch_size), strategy)
        trainer = assemble(job, comm, task, strategy, portion).trainer()
        held = [*portion.module.parameters(), *portion.module.buffers()]
        before = sum(local(x.detach()).nbytes for x in held)
        before += sum(flat.grads.nbytes for flat in trainer.replica.flats)
        # What an earlier run has left would count as freed by this one, whenever the collector came to it.
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
            trainer.fit()
        portion.close()
    return before + _peak(watched)


def _peak(watched: profile) -> int:
    """The most that was handed out at a time, beyond what there was at the beginning."""
    profiler = watched.profiler
    assert profiler is not None
    results = profiler.kineto_results
    assert results is not None
    live = peak = 0
    # Those of each thread come together: the backward pass has threads of its own.
    handed = [event for event in results.events() if event.name() == "[memory]"]
    for event in sorted(handed, key=lambda event: event.start_ns()):
        live += event.nbytes()  # type: ignore[attr-defined]
        peak = max(peak, live)
    return peak
