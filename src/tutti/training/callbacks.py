"""Objects of the user's that look on while a run trains, and may end it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import cloudpickle
from torch import nn

from tutti.comm.base import Communicator
from tutti.errors import BadOption
from tutti.load_object import load_object
from tutti.object_state import has_state_dict, load_state_of, state_of
from tutti.records.run import EpochRecord
from tutti.state import Values
from tutti.terminal import warn_on_stderr


@dataclass
class Course:
    """The course of a run, as callbacks on one rank see it.

    Attributes:
        rank: the number of this rank among those that train.
        ranks: how many there are.
        model: the module, to be read only: its weights may lie in memory that all ranks share. Where each
            worker has weights of its own, these are this worker's, and after an epoch what is evaluated.
            Gradients that a callback computes, and modes that it sets, such as by `model.eval()`, are its
            own: training goes on without them.
        step: the updates made since the run began; where each worker makes its own, those of this one.
        history: the records of the epochs that are over; equal on all ranks but for the times.
    """

    rank: int
    ranks: int
    model: nn.Module
    step: int = 0
    history: Sequence[EpochRecord] = field(default_factory=list)
    _reason: str | None = None

    def stop(self, why: str) -> None:
        """End the run with the epoch that is under way, or just over; one rank that asks is enough.

        Args:
            why: a clause for the summary: "the ratio of the losses has reached 2".
        """
        self._reason = self._reason or str(why or "a callback has asked for it")


class Callback:
    """An object that looks on while a run trains; by itself it does nothing.

    Every rank has a copy of its own, so what one rank alone shall do, such as to print, stands behind
    `if course.rank == 0:`. The moments come in the order `begin`, (`step`..., `epoch`)..., `end`. An
    exception in one ends the run, as an error of that rank.

    One that has `state_dict()` and `load_state_dict(state)` goes on with a run that is resumed, or goes on
    after a loss: each rank's with its own state, or on another number of ranks with rank 0's. It is loaded
    before `begin`.
    """

    def begin(self, course: Course) -> None:
        """Look at the run before its first update, or where it goes on: then `course.step` is above 0."""

    def step(self, course: Course) -> None:
        """Look at an update that this rank has just made."""

    def epoch(self, course: Course, record: EpochRecord) -> None:
        """Look at an epoch whose validation is known; with `validate="background"` later ones have begun."""

    def end(self, course: Course) -> None:
        """Look at the final weights. Not called for a run that fails, or stops to go on another time."""


class Callbacks:
    """The callbacks of a run on one rank: objects, or names of them or of their classes.

    Raises:
        UserError: a name finds nothing, or an object is no callback.
    """

    def __init__(
        self,
        given: str | Callback | Sequence[str | Callback],
        comm: Communicator,
        model: nn.Module,
    ) -> None:
        several = [given] if isinstance(given, Callback) else given
        if isinstance(several, str):
            several = [name.strip() for name in several.split(",") if name.strip()]
        self._given = [one for one in several if not isinstance(one, str)]
        self._all = [_found(one) for one in several]
        # An object may have been given a function of its own.
        self._of_steps = [
            one for one in self._all if getattr(one.step, "__func__", None) is not Callback.step
        ]
        self._comm, self._course = comm, Course(comm.rank, comm.size, model)

    def begin(self, step: int, history: Sequence[EpochRecord]) -> None:
        """Tell them that training begins after so many updates, and where further records will be."""
        self._course.step, self._course.history = step, history
        self._tell(self._all, "begin")

    def step(self, step: int) -> None:
        """Tell them of an update, the `step`-th of the run."""
        self._course.step = step
        if self._of_steps:
            self._tell(self._of_steps, "step")

    def epoch(self, record: EpochRecord) -> None:
        """Tell them of an epoch, whose record is in the history."""
        self._tell(self._all, "epoch", record)

    def end(self) -> None:
        """Tell them that the final weights are in place."""
        self._tell(self._all, "end")

    def _tell(self, callbacks: Sequence[Callback], moment: str, *more: EpochRecord) -> None:
        """Keep the gradients that they compute, and the modes that they set, out of the training."""
        model = self._course.model
        gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        modes = [(module, module.training) for module in model.modules()]
        for parameter, _ in gradients:
            parameter.grad = None
        for one in callbacks:
            getattr(one, moment)(self._course, *more)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        for module, mode in modes:
            module.training = mode

    def why_end(self) -> str | None:
        """Return why one of them, on the lowest rank that asks, wants the run to end (collective)."""
        asked = self._comm.all_gather_objects(self._course._reason)
        return next((str(reason) for reason in asked if reason is not None), None)

    def ask(self, reason: str | None) -> None:
        """Ask for the end that one of them had asked for, of a run that goes on within the same epoch."""
        if reason is not None:
            self._course.stop(reason)

    def state(self) -> Values:
        """Return the states of those that have one."""
        return {name: state_of(one, name) for name, one in self._lasting()}

    def load_state(self, values: Values) -> None:
        """Have those go on that `state` had the states of; others begin anew."""
        for name, one in self._lasting():
            if name in values:
                load_state_of(one, values[name])

    def _lasting(self) -> Iterator[tuple[str, Callback]]:
        """Yield those that have a state, by their class and number."""
        for number, one in enumerate(self._all):
            if has_state_dict(one):
                yield f"{type(one).__name__} {number}", one

    def attributes(self) -> list[bytes | None]:
        """Return what each of the caller's objects has become, pickled; None if it cannot be."""
        found: list[bytes | None] = []
        for one in self._given:
            try:
                found.append(bytes(cloudpickle.dumps(vars(one))))
            except Exception as error:
                found.append(None)
                if self._comm.rank == 0:
                    name = type(one).__name__
                    warn_on_stderr(f"what the callback {name} has noted stays on rank 0: {error}")
        return found


def _found(one: object) -> Callback:
    found = load_object(one, "callback") if isinstance(one, str) else one
    if isinstance(found, type) and issubclass(found, Callback):
        found = found()
    if not isinstance(found, Callback):
        name = one if isinstance(one, str) else type(one).__name__
        raise BadOption(f"'{name}' is no callback; derive its class from tutti.Callback")
    return found
