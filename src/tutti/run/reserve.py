"""Ranks in reserve: they prepare themselves, rehearse two steps of training, and wait until they are needed.

    prepared ── rehearsal: begin, a step, copy the state, go on from that, a step ── waits ── goes on

A process that does something for the first time takes several times as long for it: it imports, copies the
memory that it has from its parent page by page, and lets the libraries choose their kernels.
"""

from __future__ import annotations

import gc
from contextlib import ExitStack, closing
from dataclasses import replace
from functools import partial
from typing import cast

from typing_extensions import override

from tutti.checkpoint.in_memory import MemorySaver, kept_in
from tutti.checkpoint.memory_files import MemoryPlace, StateMemory
from tutti.comm.base import Communicator
from tutti.comm.shm.arena import Arena
from tutti.comm.shm.communicator import HostCommunicator
from tutti.comm.shm.memfd import FileAddress
from tutti.data import DataSet
from tutti.data.streaming.part import StreamedPart
from tutti.launch.memory_shortage import be_ended_first
from tutti.run.build import Task, prepare_task, seeded
from tutti.run.checks import check_strategy
from tutti.run.jobs import load_job
from tutti.run.kept_data import KeptData
from tutti.run.restore import facts_of, laid_out
from tutti.run.servers import take_sides, work_or_serve
from tutti.run.train_job import TrainJob, again
from tutti.state import State
from tutti.strategies import Strategy
from tutti.strategies.base import Pace
from tutti.training.agenda import Agenda, Decision, Wishes
from tutti.training.loggers import logger_names
from tutti.training.run_parts import Hooks
from tutti.training.trainer import Trainer
from tutti.training.validation import VALIDATIONS


class _OneStep(Agenda):
    """Ends a run after the next step of each rank, with its state."""

    @override
    def calls(self, step: int) -> bool:
        return True

    @override
    def decide(self, step: int, epoch: int) -> Decision:
        return Decision(save=True, stop="the rehearsal is over")


def rehearse(job: TrainJob, comm: HostCommunicator, dataset: DataSet, strategy: Strategy) -> None:
    """Train for two steps, the second from a copy of the state after the first (collective).

    Nothing of it is left but what makes the process faster. Streamed data are not rehearsed with, as those
    that train read the same files into the same memory.

    Args:
        job: a copy that nobody else uses, as its model and optimizer are changed.
        comm: all ranks in reserve.
        dataset: of the job; it is only read.
        strategy: of the job.

    Raises:
        UserError: as of a training.
    """
    if any(isinstance(part, StreamedPart) for part in dataset.parts):
        return
    logger_names(job.config.log)
    VALIDATIONS.named(job.config.validate)
    with ExitStack() as stack, seeded(job.config.seed):
        apart = comm.over(stack.enter_context(closing(_own_memory(comm))), HostCommunicator)
        memory = stack.enter_context(closing(StateMemory())) if comm.rank == 0 else None
        place = cast("MemoryPlace", comm.broadcast_object(None if memory is None else memory.place))
        team = take_sides(apart, job.config)

        def step(task: Task) -> None:
            with (
                closing(MemorySaver(team, place)) as saver,
                laid_out(job, team, task, strategy, kept_in(team, place)) as (parts, saved),
            ):

                def keep(step: int, state: State, _: Decision) -> None:
                    facts = facts_of(parts.config, task.dataset) if team.rank == 0 else {}
                    saver.save(step, parts.portion.to_save(state), facts)

                hooks, agenda = Hooks(save=keep), _OneStep(team, Wishes(free=strategy.pace is Pace.FREE))
                Trainer(parts.workers, task.objective, parts.schedule, hooks=hooks, agenda=agenda).fit(saved)

        for _ in range(2):
            task = prepare_task(job, dataset)  # Layouts over ranks change the model for good.
            work_or_serve(job, team, task.module, strategy, partial(step, task))
        comm.barrier()
    gc.collect()


def _own_memory(comm: Communicator) -> Arena:
    """Make an arena for all ranks, which is gone when they have closed it (collective)."""
    mine = Arena.create() if comm.rank == 0 else None
    address = cast("FileAddress", comm.broadcast_object(None if mine is None else mine.address))
    arena = Arena.open(address) if mine is None else mine
    comm.barrier()
    return arena


def open_beside_others(kept: KeptData, job: TrainJob, comm: Communicator) -> DataSet:
    """Open the data set of ranks that prepare themselves while those before them may still train.

    If it is not kept, they wait until these are gone, whose memory they take.
    """
    if job.rehearses:
        be_ended_first(True)
    if not kept.is_there:
        _pass_gate(kept, job, comm)
    return kept.open(job, comm)


def _pass_gate(kept: KeptData, job: TrainJob, comm: Communicator) -> None:
    """Say that all ranks are prepared, and wait until they are needed (collective)."""
    assert isinstance(comm, HostCommunicator), "lost ranks are replaced on one host"
    assert job.gate is not None
    comm.barrier()
    if comm.rank == 0:
        comm.peers.note_prepared()
    kept.pass_gate(job.gate)
    if job.rehearses:
        be_ended_first(False)


def until_needed(
    kept: KeptData, comm: HostCommunicator, payload: bytes, job: TrainJob, dataset: DataSet
) -> TrainJob:
    """Wait until ranks in reserve are needed; returns their job as it is by then.

    Args:
        kept: has the gate.
        comm: all ranks.
        payload: their job, pickled, of which a rehearsal gets a copy.
        job: the same.
        dataset: likewise.
    """
    if job.rehearses:
        copy = load_job(payload, TrainJob)
        rehearse(copy, comm, dataset, check_strategy(copy, comm.size, comm.hosts))
        del copy
    _pass_gate(kept, job, comm)
    return again(replace(job, takes_over=True))
