"""A portion of a model whose parameters are divided: its worker's state is given to another."""

from __future__ import annotations

import pickle
from copy import deepcopy

import torch
from torch import Tensor
from torch.optim import Optimizer

from tutti.comm.base import Communicator
from tutti.model_parallel.base import Portion
from tutti.model_parallel.layout import portion_of
from tutti.optim.state import load, options_of
from tutti.replica import local
from tutti.run.build import build_strategy, open_config_data, prepare_task, seeded
from tutti.run.config import TrainConfig
from tutti.run.jobs import layout_of
from tutti.run.train_job import TrainJob
from tutti.state import Saved, named
from tutti.strategies import Clip, Strategy, Worker


def goes_on(comm: Communicator, payload: bytes) -> list[float]:
    """How far each parameter of this rank's part is from that of a run which goes on from its state."""
    job = TrainJob(TrainConfig.from_json(pickle.loads(payload)), quiet=True, write=False)
    strategy = build_strategy(job, 1, 1)
    portion, optimizer, worker = _workers(comm, job, strategy)
    _train(portion, worker, range(3))
    worker.settle()
    state, options = deepcopy((worker.state(), options_of(optimizer)))
    worker.resume()
    _train(portion, worker, range(3, 5))
    expected = _parts(portion)
    portion.close()
    saved = Saved(named([state.joint]), named([state.alone]), state.shared, state.own)
    portion, optimizer, worker = _workers(comm, job, strategy)
    load(optimizer, {p: name for name, p in portion.module.named_parameters()}, saved, options)
    worker.load_state(saved)
    _train(portion, worker, range(3, 5))
    found = [float((part - same).abs().sum()) for part, same in zip(_parts(portion), expected, strict=True)]
    portion.close()
    return found


def _workers(comm: Communicator, job: TrainJob, strategy: Strategy) -> tuple[Portion, Optimizer, Worker]:
    with seeded(job.config.seed):
        task = prepare_task(job, open_config_data(job, comm))
    layout = layout_of(job.config, comm.size)
    portion = portion_of(layout, comm, task.module, task.workload(8))
    optimizer = torch.optim.Adam(portion.module.parameters(), lr=0.1, amsgrad=True)
    return portion, optimizer, portion.worker(strategy, portion.place(strategy), optimizer, Clip(norm=1.0))


def _parts(portion: Portion) -> list[Tensor]:
    return [local(parameter.detach()).clone() for parameter in portion.module.parameters()]


def _train(portion: Portion, worker: Worker, steps: range) -> None:
    for step in steps:
        for number, parameter in enumerate(portion.module.parameters()):
            parameter.grad = torch.full_like(parameter.detach(), 0.1 * (1 + step) / (1 + number))
        worker.step()
