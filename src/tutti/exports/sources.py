"""Weights from any path: a run, one of its checkpoints, or files of another program."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from torch import nn

from tutti.checkpoint.reading import Checkpoint, newest, open_checkpoint
from tutti.errors import BadCheckpoint
from tutti.exports import FORMS
from tutti.exports.base import Exported
from tutti.optim.state import by_name
from tutti.records import checkpoints
from tutti.records.run_folder import WEIGHTS
from tutti.terminal import warn_on_stderr
from tutti.training.weights import read_weights, set_weights


def read_from(place: Path) -> Exported:
    """Read the weights at a path, and the optimizer's state if it is there."""
    if not place.exists():
        raise BadCheckpoint(f"{place} does not exist; give a run folder, a checkpoint or a file of weights")
    if (place / WEIGHTS).is_file():
        return Exported(read_weights(place / WEIGHTS))
    if (place / checkpoints.FOLDER).is_dir():
        return _newest(place)
    if own := checkpoints.present(place):  # a folder of `tutti.checkpoints`
        return _of_checkpoint(open_checkpoint(own[-1]))
    if (place / checkpoints.MANIFEST).exists() or place.absolute().parent.name == checkpoints.FOLDER:
        return _of_checkpoint(open_checkpoint(place))
    for form in FORMS.values():
        if form.fits(place):
            return form.read(place)
    raise BadCheckpoint(
        f"{place} has no weights that can be read; give a run folder, one of its checkpoints, or what one of "
        f"these has written: {', '.join(FORMS)}"
    )


def load_from(place: Path, module: nn.Module, warn: bool) -> None:
    """Set the parameters and buffers of a module from a path."""
    exported = read_from(place)
    for note in exported.notes if warn else ():
        warn_on_stderr(note)
    set_weights(module, exported.weights, place)


def _newest(place: Path) -> Exported:
    found, passed_over = newest(place / checkpoints.FOLDER)
    if found is None:
        none = f"{place} has neither final weights nor a checkpoint that is whole"
        raise BadCheckpoint("; ".join([none, *passed_over]))
    content = _of_checkpoint(found)
    taken = f"{place} has no final weights; those of step {found.step} are taken"
    return replace(content, notes=(*passed_over, taken, *content.notes))


def _of_checkpoint(checkpoint: Checkpoint) -> Exported:
    if checkpoint.facts.get("config", {}).get("parallel") is not None:
        raise BadCheckpoint(
            f"{checkpoint.path} has each rank's part of the model alone; let the run end with 'tutti train "
            f"--resume' and --steps {checkpoint.step}, which writes the whole weights"
        )
    saved, prefix = checkpoint.saved(0, checkpoint.ranks), "weights/"
    training, joint = saved.shared.get("training", {}), saved.joint
    if "names" not in training:
        raise BadCheckpoint(
            f"{checkpoint.path} is of a training loop of one's own, whose program alone knows its models; "
            "restore it there, and save it with torch.save or torch.distributed.checkpoint"
        )
    tensors = {name.removeprefix(prefix): x for name, x in joint.tensors.items() if name.startswith(prefix)}
    tensors |= training["buffers"]
    weights = {name: tensors[first] for name, first in training["names"].items()}
    assert saved.alone is not None
    alone = by_name([saved.alone])
    if alone and checkpoint.ranks > 1:
        left_out = "each worker has its own optimizer, so no state of an optimizer is taken"
        return Exported(weights, notes=(left_out,))
    kept = alone or by_name([joint])
    groups = training["groups"]
    before = training["schedule"]["options"]
    # In torch several numbers, such as `betas`, are a tuple.
    options = [{k: tuple(v) if isinstance(v, list) else v for k, v in one.items()} for one in before]
    return Exported(
        weights,
        {
            "state": {name: kept[name] for names in groups for name in names if name in kept},
            "param_groups": [{**one, "params": names} for one, names in zip(options, groups, strict=True)],
        },
    )
