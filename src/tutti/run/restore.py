"""Loading a checkpoint, and the check that it fits. Runs on every rank."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from torch import nn

from tutti.checkpoint.reading import Checkpoint, for_all, newest, open_checkpoint
from tutti.comm.base import Communicator
from tutti.data import DataSet
from tutti.errors import BadCheckpoint, BadOption
from tutti.model_parallel.base import of_portion
from tutti.model_parallel.layout import portion_of
from tutti.records import checkpoints
from tutti.records.json_lines import Json, parse_record
from tutti.records.run import EpochRecord
from tutti.records.run_folder import RunFolder
from tutti.replica import local
from tutti.run.build import Assembly, Task, assemble
from tutti.run.config import TrainConfig
from tutti.run.jobs import Recipe, layout_of
from tutti.run.resume import Resume
from tutti.state import Saved
from tutti.strategies import Solo, Strategy, Sync
from tutti.terminal import warn_on_stderr
from tutti.training.run_parts import Schedule


def found_by(comm: Communicator, resume: Resume) -> Checkpoint | None:
    """Find the checkpoint to continue from (collective); rank 0 reports damaged ones."""
    found: Checkpoint | None = None
    if comm.rank == 0:
        found = _newest(resume) if resume.checkpoint is None else open_checkpoint(resume.checkpoint)
    return for_all(comm, found) if comm.broadcast_object(found is not None) else None


def _newest(resume: Resume) -> Checkpoint | None:
    found, passed_over = newest(resume.folder / checkpoints.FOLDER)
    for sentence in passed_over:
        warn_on_stderr(sentence)
    finished = RunFolder(resume.folder).finished
    if found is None and (not resume.auto or finished):
        ended = finished and not passed_over
        why = "keeps its weights only, as it has ended" if ended else "has no checkpoint that is whole"
        raise BadCheckpoint(
            f"{resume.folder} {why}; begin another run with --weights RUN, or train with --checkpoint"
        )
    return found


def facts_of(config: TrainConfig, dataset: DataSet) -> Json:
    """Return the facts by which another run sees whether the checkpoint fits."""
    return {"config": config.as_json(), "data": fingerprint(dataset)}


def fingerprint(dataset: DataSet) -> Json:
    """Return what identifies the samples of a data set: the source, and the rows of each part."""
    parts = {"train": dataset.train, "validation": dataset.validation}
    found = {}
    for name, part in parts.items():
        if part is not None:
            own = [one.cpu().numpy().tobytes() for one in (part.rows, part.stored_weights) if one is not None]
            found[name] = [part.fingerprint, zlib.crc32(b"".join(own))]
    return found


def saved_for(
    checkpoint: Checkpoint, comm: Communicator, strategy: Strategy, config: TrainConfig, dataset: DataSet
) -> Saved:
    """Return the state from which this worker continues."""
    before = checkpoint.facts["data"]
    others = [name for name, found in fingerprint(dataset).items() if before.get(name) != found]
    if others:
        raise BadCheckpoint(
            f"{checkpoint.path} was made of other data: the {' and '.join(others)} samples differ; resume "
            "with the data that the run began with"
        )
    earlier = TrainConfig.from_json(checkpoint.facts["config"])
    layout = layout_of(config, comm.size)
    if layout != layout_of(earlier, checkpoint.ranks):
        raise BadCheckpoint(
            f"{checkpoint.path} is of a run in another layout; resume it with -n {checkpoint.ranks}"
            + (f" --parallel {earlier.parallel}" if earlier.parallel else ", without --parallel")
        )
    saved = checkpoint.saved(comm.rank, comm.size)
    if layout is not None:
        saved = of_portion(saved, comm.rank % layout.team)
    if earlier.batch_size != config.batch_size:
        saved = Saved(saved.joint, None, saved.shared, None)
    # The configuration calls a class of the user's by its file or package.
    called = earlier.strategy in (strategy.name, config.strategy)
    same = called and earlier.strategy_options == strategy.options()
    if not same and not _takes_over(strategy, earlier):
        # Another strategy's worker state is of no use here.
        shared = {name: values for name, values in saved.shared.items() if name != "worker"}
        return Saved(saved.joint, None, shared, None)
    return saved


def _takes_over(strategy: Strategy, earlier: TrainConfig) -> bool:
    """Return whether the other strategy's workers kept the same state: only the optimizer's."""
    kept = earlier.strategy_options.get("compress", "none") != "none"
    return {strategy.name, earlier.strategy} == {Solo.name, Sync.name} and not kept


@contextmanager
def laid_out(
    recipe: Recipe,
    comm: Communicator,
    task: Task,
    strategy: Strategy,
    checkpoint: Checkpoint | None,
    ends: Callable[[], str | None] | None = None,
) -> Iterator[Assembly]:
    """Lay the model out for training, with the state of a checkpoint if there is one (collective)."""
    config = recipe.config
    layout, work = layout_of(config, comm.size), task.workload(config.batch_size)
    saved = None
    if checkpoint is not None:
        saved = saved_for(checkpoint, comm, strategy, config, task.dataset)
    with closing(portion_of(layout, comm, task.module, work, strategy)) as portion:
        if saved is not None:
            load_model(portion.module, saved)
        yield assemble(recipe, comm, task, strategy, portion, saved, ends)


def load_model(module: nn.Module, saved: Saved) -> None:
    """Load the weights of a checkpoint into a model, or this rank's portion of it."""
    weights = {
        name.removeprefix("weights/"): tensor
        for name, tensor in saved.joint.tensors.items()
        if name.startswith("weights/")
    }
    own = {name: local(parameter.detach()) for name, parameter in module.named_parameters()}
    shapes, saved_shapes = ({name: one.shape for name, one in these.items()} for these in (own, weights))
    if shapes != saved_shapes:
        differ = dict(sorted(set(shapes.items()) ^ set(saved_shapes.items())))
        listed = ", ".join(f"'{name}' of shape {tuple(shape)}" for name, shape in differ.items())
        raise BadCheckpoint(
            f"the checkpoint is of another model, as only one of them has {listed}; resume with the model "
            "that the run began with"
        )
    for name, parameter in own.items():
        parameter.copy_(weights[name])


def refuse_shorter(checkpoint: Checkpoint, saved: Saved, schedule: Schedule) -> None:
    """Refuse a run that would end before the checkpoint."""
    training, per_epoch = saved.shared["training"], schedule.batches.updates
    begun = training["epoch"] * per_epoch
    # Other workers have other batches left in the epoch.
    alike = training.get("per_epoch", per_epoch) == per_epoch
    made = begun + saved.shared["batches"]["rounds"][0] if alike else begun
    if max(made, begun + 1) > schedule.updates:
        raise BadOption(
            f"the run would end after {schedule.updates:,} steps, and {checkpoint.path} was made after "
            f"{made:,}; give more --epochs or --steps"
        )


def history_of(saved: Saved) -> list[EpochRecord]:
    """Return the epochs of the run before the checkpoint."""
    return [parse_record(text, EpochRecord) for text in saved.shared["training"]["history"]]


def not_restored(saved: Saved, worker: Any) -> list[str]:
    """Return the parts that are not restored."""
    if "worker" not in saved.shared:
        return ["the state of the other strategy's workers"]
    return [] if saved.own is not None else list(worker.restarts)
