"""The user's objects that observe a run, and may end it."""

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
        rank: the number of this rank.
        ranks: the number of ranks that train.
        model: the module, read-only: ranks may share its weights. Where each worker has its own weights,
            these are this worker's, and after an epoch the evaluated ones. A callback may compute gradients
            and set modes, as by `model.eval()`, without an effect on training.
        step: the updates made since the run began; where each worker makes its own, this worker's.
        history: the records of the finished epochs; equal on all ranks except for the times.
    """

    rank: int
    ranks: int
    model: nn.Module
    step: int = 0
    history: Sequence[EpochRecord] = field(default_factory=list)
    _reason: str | None = None

    def stop(self, why: str) -> None:
        """End the run after the current epoch; one rank that calls this is enough.

        Args:
            why: a clause for the summary: "the ratio of the losses has reached 2".
        """
        self._reason = self._reason or str(why or "a callback has asked for it")


class Callback:
    """An observer of a run; the base class does nothing.

    Every rank has its own copy: print behind `if course.rank == 0:`. The calls come in the order `begin`,
    (`step`..., `epoch`)..., `end`. An exception in one ends the run, as an error of that rank.

    A callback with `state_dict()` and `load_state_dict(state)` keeps its state over a resume or a lost rank:
    its own rank's state, or on another number of ranks rank 0's. The state is loaded before `begin`.
    """

    def begin(self, course: Course) -> None:
        """Training begins, or is resumed: then `course.step` is above 0."""

    def step(self, course: Course) -> None:
        """The rank has made an update."""

    def epoch(self, course: Course, record: EpochRecord) -> None:
        """The validation of an epoch is known; with `validate="background"` later epochs have begun."""

    def end(self, course: Course) -> None:
        """The final weights are in place. Not called for a run that fails, or stops to be resumed."""


class Callbacks:
    """The callbacks of a run on one rank: objects, or names of objects or classes."""

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
        # `step` may be set on the object itself.
        self._of_steps = [
            one for one in self._all if getattr(one.step, "__func__", None) is not Callback.step
        ]
        self._comm, self._course = comm, Course(comm.rank, comm.size, model)

    def begin(self, step: int, history: Sequence[EpochRecord]) -> None:
        """Training begins after `step` updates; further records will be in `history`."""
        self._course.step, self._course.history = step, history
        self._call(self._all, "begin")

    def step(self, step: int) -> None:
        """The `step`-th update of the run is made."""
        self._course.step = step
        if self._of_steps:
            self._call(self._of_steps, "step")

    def epoch(self, record: EpochRecord) -> None:
        """An epoch is over, and its record is in the history."""
        self._call(self._all, "epoch", record)

    def end(self) -> None:
        """The final weights are in place."""
        self._call(self._all, "end")

    def _call(self, callbacks: Sequence[Callback], moment: str, *more: EpochRecord) -> None:
        """Call a method of callbacks; restore gradients and modes afterwards."""
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
        """Return the reason for ending the run of the lowest rank that has one (collective)."""
        reasons = self._comm.all_gather_objects(self._course._reason)
        return next((str(reason) for reason in reasons if reason is not None), None)

    def state(self) -> Values:
        """Return the states of the callbacks that have one."""
        return {name: state_of(one, name) for name, one in self._lasting()}

    def load_state(self, values: Values) -> None:
        """Load the states of an earlier run."""
        for name, one in self._lasting():
            if name in values:
                load_state_of(one, values[name])

    def _lasting(self) -> Iterator[tuple[str, Callback]]:
        """Yield the callbacks with a state, named by class and number."""
        for number, one in enumerate(self._all):
            if has_state_dict(one):
                yield f"{type(one).__name__} {number}", one

    def attributes(self) -> list[bytes | None]:
        """Return the pickled attributes of each of the caller's objects; None if they cannot be pickled."""
        found: list[bytes | None] = []
        for one in self._given:
            try:
                found.append(bytes(cloudpickle.dumps(vars(one))))
            except Exception as error:
                found.append(None)
                if self._comm.rank == 0:
                    name = type(one).__name__
                    warn_on_stderr(f"the attributes of the callback {name} stay on rank 0: {error}")
        return found


def _found(one: object) -> Callback:
    found = load_object(one, "callback") if isinstance(one, str) else one
    if isinstance(found, type) and issubclass(found, Callback):
        found = found()
    if not isinstance(found, Callback):
        name = one if isinstance(one, str) else type(one).__name__
        raise BadOption(f"'{name}' is no callback; derive its class from tutti.Callback")
    return found
