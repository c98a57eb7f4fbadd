"""The run to resume: its checkpoints, and the options that may differ. Needs no torch."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

from tutti.errors import BadOption, BadRunFolder
from tutti.launch.allocation import find_allocation
from tutti.launch.launcher import Launcher, started_by
from tutti.launch.placement import SLURM
from tutti.records import checkpoints
from tutti.records.folder_lock import refuse_locked
from tutti.records.run_folder import CONFIG, RunFolder, refuse_no_folder, run_of
from tutti.run.config import OBJECT, TrainConfig, flag
from tutti.run.trust import code_named

AUTO: Final = "auto"
"""Continues the run in --out if it has a checkpoint, else begins it."""

SOLO: Final = "solo"
"""The strategy of one worker."""

_STREAM: Final = "stream"
"""The option of `tutti.data.streaming`, which imports torch."""

MAY_DIFFER: Final = frozenset(
    {
        *("workers", "threads", "hosts", "servers", "levels", "server_period", "device", "cuda_graph"),
        *("strategy", "strategy_options", "balance"),
        *("validate", "precision", "layout", "accumulate"),
        *("epochs", "steps", "monitor", "patience", "goal", "restore_best"),
        *("time_limit", "checkpoint", "keep", "log", "out"),
        *("predictions", "callbacks", "on_failure", "hang_timeout"),
        "skip_nonfinite",
    }
)
"""Options that may differ from the checkpoint's run. All others affect what is learned."""


@dataclass(frozen=True)
class Resume:
    """An earlier run, and the place to continue it."""

    folder: Path  # of the run
    checkpoint: Path | None = None  # the folder of one of its checkpoints; None: the newest good one
    auto: bool = False  # the run begins if there is none
    again: bool = False  # it has lost ranks, and continues without the user

    @property
    def goes_on(self) -> bool:
        """True if there is a checkpoint, or the run has ended."""
        return bool(checkpoints.present(self.folder / checkpoints.FOLDER)) or RunFolder(self.folder).finished

    @classmethod
    def find(cls, where: str, out: str | None) -> Resume | None:
        """Find the run that `--resume` names, or for `AUTO` the one in `--out`; None: there is none yet."""
        if where == AUTO:
            if out is None:
                raise BadOption("--resume auto continues the run in --out; name that folder too")
            return cls(Path(out), auto=True) if (Path(out) / CONFIG).is_file() else None
        path = Path(where)
        refuse_no_folder(path)
        folder, inside = run_of(path)
        if out is not None and Path(out).resolve() != folder.resolve():
            raise BadOption(f"--out is {out}, but a resumed run stays in {folder}; leave --out out")
        found = cls(RunFolder.open(folder).path, path.resolve() if inside else None)
        if not found.goes_on:
            # A run that has only begun is to be waited for, not to be trained again.
            refuse_locked(folder)
            raise BadRunFolder(
                f"{folder} has no checkpoint to resume; train again, with --checkpoint 1m or the like, "
                "or with --resume auto, which begins a run that has none"
            )
        return found


def way_on(folder: Path | str | None, objects: Collection[str], config: TrainConfig) -> str:
    """Return the command that resumes a run."""
    if objects:
        return f"the same call of tutti.train, with resume={str(folder)!r}"
    trust = " --trust" if code_named(config.as_json()) else ""
    return f"tutti train --resume {shlex.quote(str(folder))}{trust}"


def placed(before: TrainConfig, given: Collection[str]) -> TrainConfig:
    """Return the configuration of a run without the places of its ranks, if they will be others now."""
    if before.strategy == SOLO and "strategy" not in given:
        before = replace(before, strategy=AUTO)
    if started_by().launcher is not Launcher.ALONE:  # which has chosen the ranks
        return replace(before, workers="auto", hosts=None, threads=None)
    if "hosts" in given:
        return replace(before, workers="auto", threads=None)
    if "workers" in given:
        return replace(before, hosts=None, threads=None)
    if find_allocation(os.environ) is not None:
        return replace(before, workers="auto", hosts=SLURM if before.hosts else None, threads=None)
    return before


def going_on(before: TrainConfig, now: TrainConfig) -> TrainConfig:
    """Return the configuration of a resumed run, once it is certain that it learns the same."""
    stream = before.data_options.get(_STREAM)
    if now.data_options.get(_STREAM) == AUTO and stream is not None:
        now = replace(now, data_options={**now.data_options, _STREAM: stream})
    if now.lr == AUTO:  # which has picked the rate at the beginning
        now = replace(now, lr=before.lr)
    differ = [
        f"{option} {'none' if value is None else value} (was {'none' if was is None else was})"
        for f in fields(TrainConfig)
        if f.name not in MAY_DIFFER
        for option, was, value in _options(f.name, getattr(before, f.name), getattr(now, f.name))
        if value != was
    ]
    if differ:
        given = any(f"(was {OBJECT}" in one for one in differ)  # nothing can be left out in place of that
        raise BadOption(
            f"a run cannot be resumed with {', '.join(differ)}: that would be another training; "
            + ("give as at first" if given else "leave out")
            + " what differs, or begin a new run in another folder"
        )
    return now


def _options(name: str, before: object, now: object) -> Iterator[tuple[str, object, object]]:
    """Yield a field's options of the command line, each with its earlier and its present value."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        yield flag(name), before, now
        return
    for key in dict.fromkeys((*before, *now)):
        yield f"--{name.removesuffix('_options')}.{key}", before.get(key), now.get(key)
