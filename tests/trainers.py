"""A trainer from the parts of a run by name, for tests that vary a few of them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from torch import nn
from torch.optim import Optimizer

from tutti.comm.base import Communicator
from tutti.data.batches import Batches
from tutti.data.parts import Part
from tutti.state import Saved, State
from tutti.strategies import Clip, Strategy, Worker
from tutti.strategies.base import Pace
from tutti.strategies.placement import place
from tutti.training.evaluation import Objective
from tutti.training.losses import LOSSES
from tutti.training.run_parts import Hooks, Schedule, Workers
from tutti.training.trainer import Trainer
from tutti.training.validation import ValidationPlan


class Forgetful(Worker):
    """A worker that knows nothing besides its replica's weights, or whose run is not gone on from."""

    def state(self) -> State:
        return State()

    def load_state(self, saved: Saved) -> None:
        return


def trainer_of(**given: Any) -> Trainer:
    """The trainer with these fields of `Workers`, `Objective`, `Schedule` and `Hooks`.

    Args:
        given: besides, `validation`, a part, and `validate`, how; `ending` and `agenda`.
    """
    ending, agenda = given.pop("ending", None), given.pop("agenda", None)
    part, how = given.pop("validation", None), given.pop("validate", "pause")

    def made(kind: type[Any]) -> Any:
        return kind(**{f.name: given.pop(f.name) for f in fields(kind) if f.name in given})

    parts = made(Workers), made(Objective), made(Schedule)
    validation = None if part is None else ValidationPlan(part, how)
    trainer = Trainer(*parts, validation, made(Hooks), agenda, ending)
    assert not given, f"no part of a run: {', '.join(given)}"
    return trainer


def trainer_by(
    strategy: Strategy,
    comm: Communicator,
    module: nn.Module,
    optimizer: Optimizer,
    part: Part,
    batch_size: int,
    clip: Clip | None = None,
    **given: Any,
) -> Trainer:
    """The trainer of a strategy's worker on the batches of a part, by default by cross entropy."""
    replica = place(module, comm, strategy.home)
    own = strategy.pace is not Pace.TOGETHER
    batches = Batches(part, batch_size, comm.rank, comm.size, strategy.passes, seed=5, own=own)
    worker = strategy.worker(replica, comm, optimizer, clip or Clip())
    parts = {"comm": comm, "replica": replica, "worker": worker, "optimizer": optimizer, "batches": batches}
    return trainer_of(**parts, **{"loss": LOSSES["cross_entropy"], **given})
