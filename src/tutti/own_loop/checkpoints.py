"""Checkpoints of a user's own loop: the state that its ranks need to continue with the next batch."""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final, cast
from zlib import crc32

import torch
from torch.optim import Optimizer

from tutti.checkpoint.reading import Checkpoint, for_all, newest
from tutti.checkpoint.saver import Saver
from tutti.errors import BadCheckpoint, BadOption, BadRunFolder, TuttiError
from tutti.object_state import as_values, from_values, load_state_of, state_of
from tutti.optim.state import options_of
from tutti.own_loop.loop import OpenIteration
from tutti.own_loop.meetings import Purpose
from tutti.own_loop.places import IterationStart
from tutti.own_loop.stepper import OwnLoop, Stepper, names_in, own_parameters
from tutti.records.folder_lock import FolderLock
from tutti.run.restore import load_model
from tutti.state import Saved, State, Values, found_under, name_of, put_under, whole_piece
from tutti.terminal import warn_on_stderr
from tutti.training.evaluation import load_buffers, mean_buffers, named_buffers
from tutti.training.module_state import ModuleState, load_random_state, random_state

WEIGHTS: Final = "weights"
"""The first word of the names of a model's weights."""


@dataclass(frozen=True)
class RankReport:
    """A rank's message to the others before a checkpoint."""

    step: int  # the number of steps made, as the program counts
    stepped: list[int]  # for each unfinished iteration, the innermost last, the batches trained on
    random: dict[str, int]  # a checksum of each kind of random numbers


class Checkpoints:
    """The checkpoints of a loop; all ranks call its methods together. Made by `tutti.checkpoints`.

    Attributes:
        values: the values that `save` was given besides the step, in the restored checkpoint.

    Args:
        loop: the ranks, their models and optimizers.
        folder: of the checkpoints.
        keep: the number of latest checkpoints to keep.
        objects: further objects with a state, by name.
    """

    def __init__(self, loop: OwnLoop, folder: Path, keep: int, objects: Mapping[str, Any]) -> None:
        self._loop, self._folder, self._objects = loop, folder, objects
        self._steppers, self._process = list(loop.steppers), os.getpid()
        self._module_states = {one: ModuleState(one.replica.module) for one in self._first_of_models()}
        if folder in loop.folders:
            loop.folders[folder]()
        self._lock: FolderLock | None = None
        refused = loop.comm.broadcast_object(self._take_lock() if loop.comm.rank == 0 else None)
        if isinstance(refused, TuttiError):
            raise refused
        self._saver = Saver(loop.comm, folder, keep)
        self.values: dict[str, Any] = {}
        loop.folders[folder] = self.close
        loop.keeps_places = True
        atexit.register(self.close)

    def save(self, step: int, *, wait: bool = False, score: float | None = None, **values: Any) -> bool:
        """Take a checkpoint between two steps (collective). It is written while the loop continues.

        Args:
            step: the number of steps made.
            wait: wait until it is on the disk.
            score: the quality of the model, higher is better: the best checkpoint is kept besides the latest.
            **values: further values that the program needs to continue, such as `epoch=3`: None, numbers,
                texts, tensors, and lists and dictionaries of them. Rank 0's are kept.

        Returns:
            The same on all ranks; False: it was left out, as the previous one is still being written.

        Raises:
            BadOption: there are gradients that no step has used yet; or `step` or a value cannot be saved.
        """
        loop, comm = self._loop, self._loop.comm
        if not isinstance(step, int) or step < 0:
            raise BadOption(f"save() is given step {step!r}; give the number of steps that were made, from 0")
        if self._steppers != loop.steppers or any(one.start is None for one in self._trained()):
            raise BadOption(
                "tutti.checkpoints() was called before distribute(), or inside of a loop over tutti.shard(); "
                "call it between them"
            )
        loop.exchange.meetings.come(Purpose.SAVE)
        reports = cast("list[RankReport]", comm.all_gather_objects(self._report(step)))
        if any((one.step, len(one.stepped)) != (step, len(reports[0].stepped)) for one in reports):
            raise BadOption(
                f"save() is given different steps, by rank {[one.step for one in reports]}, or is called in "
                "different numbers of loops over tutti.shard(); call it at the same place on all ranks"
            )
        return self._saver.save(step, self._state(values, reports), {"step": step}, score, wait)

    def restore(self) -> int:
        """Continue from the newest intact checkpoint, if there is one (collective).

        Weights, buffers, optimizers, all given objects and random numbers get their state, and the unfinished
        loops over `tutti.shard` continue after the last batch that was trained on. Call it before these
        loops.

        Returns:
            Its step; 0: there is none.

        Raises:
            BadCheckpoint: it is of another model or program, or a newer version of tutti has written it.
            BadOption: it is called inside a loop over `tutti.shard`.
        """
        loop, comm = self._loop, self._loop.comm
        if any(one.trained for one in loop.open):
            raise BadOption(
                "restore() is called inside of a loop over tutti.shard(), which cannot be taken back; call "
                "it before the loop"
            )
        loop.exchange.meetings.come(Purpose.RESTORE)
        found = self._find() if comm.rank == 0 else None
        there = comm.broadcast_object(found if isinstance(found, TuttiError) else found is not None)
        if isinstance(there, TuttiError):
            raise there
        if not there:
            return 0
        checkpoint = for_all(comm, found if isinstance(found, Checkpoint) else None)
        return self._load(checkpoint, checkpoint.saved(comm.rank, comm.size))

    def close(self) -> None:
        """Wait for the last checkpoint, and leave the folder; the end of the program does the same."""
        atexit.unregister(self.close)
        if os.getpid() == self._process and self._loop.folders.get(self._folder) == self.close:
            del self._loop.folders[self._folder]
            self._saver.end()
            if self._lock is not None:
                self._lock.__exit__()

    def _take_lock(self) -> TuttiError | None:
        """Keep other programs from writing to the folder; return an error if that failed."""
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._lock = FolderLock(self._folder)
        except BadRunFolder as error:
            return error
        except OSError as error:
            return BadRunFolder(
                f"cannot write {self._folder}: {error.strerror}; give tutti.checkpoints() a folder that you "
                "may write"
            )
        return None

    def _find(self) -> Checkpoint | TuttiError | None:
        """Find the newest checkpoint; warn of damaged ones."""
        try:
            found, passed_over = newest(self._folder)
        except BadCheckpoint as error:
            return error
        for sentence in passed_over:
            warn_on_stderr(sentence)
        if found is None and passed_over:
            return BadCheckpoint(f"{self._folder} has no checkpoint that is whole; begin in another folder")
        return found

    def _report(self, step: int) -> RankReport:
        """Return this rank's message to the others."""
        random = {kind: crc32(repr(_plain(state)).encode()) for kind, state in random_state().items()}
        return RankReport(step, [one.stepped for one in self._trained()], random)

    def _trained(self) -> list[OpenIteration]:
        """Return the unfinished training iterations."""
        return [one for one in self._loop.open if one.trained]

    def _state(self, values: Mapping[str, Any], reports: list[RankReport]) -> State:
        """Return the state to continue from (collective)."""
        comm = self._loop.comm
        alike = [k for k, check in reports[0].random.items() if all(r.random[k] == check for r in reports)]
        iterations = list[Values]()
        for number, one in enumerate(self._trained()):
            assert one.start is not None, "an iteration without one is refused"
            trained = min(report.stepped[number] for report in reports)
            iterations.append(asdict(replace(one.start, first=one.start.first + trained)))
        objects = {name: state_of(thing, name) for name, thing in self._objects.items()}
        state = State(
            shared={
                "values": as_values(values, "save()'s values"),
                "objects": objects,
                "random": random_state(),
                "alike": alike,
                "iterations": iterations,
            },
            own={
                "random": random_state(),
                "generators": {
                    name: thing.get_state()
                    for name, thing in self._objects.items()
                    if isinstance(thing, torch.Generator)
                },
                "iterations": iterations,
            },
        )
        shared, own = list[Values](), list[Values]()
        for number, stepper in enumerate(self._loop.steppers):
            held = stepper.state()
            shared.append({"options": _options(stepper.optimizer)})
            own.append({})
            if stepper in self._module_states:
                module = stepper.replica.module
                names = names_in(module)
                held.pieces += [
                    whole_piece(name_of(WEIGHTS, names[parameter]), parameter)
                    for parameter in own_parameters(names, comm.rank, comm.size)
                ]
                shared[-1]["buffers"] = mean_buffers(module, comm)
                own[-1]["buffers"] = named_buffers(module)
                shared[-1]["extra"] = own[-1]["extra"] = self._module_states[stepper].extra()
            state.joint.add(put_under(str(number), held))
        state.shared["steppers"], state.own["steppers"] = shared, own
        return state

    def _load(self, checkpoint: Checkpoint, saved: Saved) -> int:
        """Continue from a checkpoint (collective)."""
        loop, shared = self._loop, saved.shared
        if "steppers" not in shared:
            raise BadCheckpoint(
                f"{checkpoint.path} was written by 'tutti train'; give tutti.checkpoints() another folder"
            )
        self._refuse_other_program(shared)
        parts = [_part(saved, number) for number in range(len(loop.steppers))]
        for stepper, part in zip(loop.steppers, parts, strict=True):
            if stepper in self._module_states:
                load_model(stepper.replica.module, part)
                held = part.shared if part.own is None else part.own
                load_buffers(stepper.replica.module, held["buffers"])
                self._module_states[stepper].load_extra(held["extra"])
        loop.comm.barrier()  # ranks may have their weights in one memory
        for stepper, part in zip(loop.steppers, parts, strict=True):
            stepper.load_state(part, from_values(part.shared["options"]))
        for name, thing in self._objects.items():
            if name not in shared["objects"]:
                continue
            if saved.own is not None and isinstance(thing, torch.Generator):
                thing.set_state(saved.own["generators"][name].clone())
            else:
                load_state_of(thing, shared["objects"][name])
        self.values = from_values(shared["values"])
        self._load_random(saved)
        starts = (shared if saved.own is None else saved.own)["iterations"]
        loop.resumed = [IterationStart(**one) for one in starts]
        loop.comm.barrier()
        return checkpoint.step

    def _refuse_other_program(self, shared: Values) -> None:
        """Refuse a checkpoint with state that this program does not have."""
        lost = [name for name in shared["objects"] if name not in self._objects]
        new = [name for name in self._objects if name not in shared["objects"]]
        if lost:
            raise BadCheckpoint(
                f"the checkpoint has the state of {', '.join(lost)}, which tutti.checkpoints() was not "
                "given; give it the same objects under the same names"
            )
        if len(shared["steppers"]) != len(self._loop.steppers):
            raise BadCheckpoint(
                f"the checkpoint has the state of {len(shared['steppers'])} optimizers, and distribute() was "
                f"given {len(self._loop.steppers)}; continue with the program that wrote it"
            )
        if new and self._loop.comm.rank == 0:
            warn_on_stderr(f"the checkpoint has no state of {', '.join(new)}")

    def _load_random(self, saved: Saved) -> None:
        """Restore random numbers; on another number of ranks only what was the same on all."""
        if saved.own is not None:
            load_random_state(saved.own["random"])
        elif self._loop.comm.rank == 0:
            load_random_state(saved.shared["random"])
        else:
            alike = {kind: saved.shared["random"][kind] for kind in saved.shared["alike"]}
            load_random_state({**random_state(), **alike})

    def _first_of_models(self) -> list[Stepper]:
        """Return the first stepper of each model."""
        first = {id(stepper.replica.module): stepper for stepper in reversed(self._loop.steppers)}
        return list(first.values())


def check_objects(loop: OwnLoop, objects: Mapping[str, Any]) -> None:
    """Raise BadOption for an object without a state, or one that is kept anyway."""
    for name, thing in objects.items():
        if any(thing is stepper.replica.module or thing is stepper.optimizer for stepper in loop.steppers):
            raise BadOption(
                f"'{name}' of tutti.checkpoints() was given to distribute(), and is in every checkpoint "
                "anyway; leave it out"
            )
        if isinstance(thing, Optimizer):
            raise BadOption(f"'{name}' of tutti.checkpoints() is an optimizer; give it to distribute()")
        if not isinstance(thing, torch.Generator) and not (
            hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
        ):
            raise BadOption(
                f"'{name}' of tutti.checkpoints() is of type {type(thing).__name__}; give it objects with "
                "state_dict() and load_state_dict(), or a torch.Generator, and give values to save()"
            )


def _options(optimizer: Optimizer) -> list[Values]:
    return cast("list[Values]", as_values(options_of(optimizer), "the optimizer's param_groups"))


def _plain(value: Any) -> Any:
    """Return a value with lists in place of tensors."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _part(saved: Saved, number: int) -> Saved:
    """Return the state of one optimizer, and of its model if the model's first optimizer is this one."""
    own = None if saved.own is None else saved.own["steppers"][number]
    return Saved(found_under(str(number), saved.joint), None, saved.shared["steppers"][number], own)
