"""A trainer from the parts of a run by name, for tests that vary a few of them."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from tutti.state import Saved, State
from tutti.strategies import Worker
from tutti.training.evaluation import Objective
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
