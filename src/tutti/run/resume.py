"""The run to go on with: where its checkpoints are, and what may be different now. Needs no torch."""

from __future__ import annotations

import os
import shlex
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Final

from tutti.errors import BadCheckpoint, BadOption, BadRunFolder
from tutti.launch.allocation import find_allocation
from tutti.launch.launcher import Launcher, started_by
from tutti.launch.placement import SLURM
from tutti.records import checkpoints
from tutti.records.folder_lock import refuse_locked
from tutti.records.json_lines import Json
from tutti.records.run_folder import CONFIG, RunFolder, refuse_no_folder
from tutti.run.config import OBJECT, TrainConfig, flag
from tutti.run.trust import code_named
from tutti.terminal import warn_on_stderr

AUTO: Final = "auto"
"""Goes on with the run in --out if it has a checkpoint, and begins it if it has none."""

SOLO: Final = "solo"
"""The strategy of one worker by itself."""

_STREAM: Final = "stream"
"""The option of `tutti.data.streaming.options`, which imports torch."""

MAY_DIFFER: Final = frozenset(
    {
        *("workers", "threads", "hosts", "servers", "levels", "server_period", "device", "cuda_graph"),
        *("strategy", "strategy_options", "balance"),
        *("validate", "precision", "layout", "accumulate"),
        *("epochs", "steps", "monitor", "patience", "target", "restore_best"),
        *("time_limit", "checkpoint", "keep", "log", "out"),
        *("predictions", "callbacks", "on_failure", "max_failures", "hang_timeout"),
        "skip_nonfinite",
    }
)
"""Options that may be others than those of the checkpoint's run. All others decide what is learned."""

_BY_SAMPLES: Final = frozenset({"data", "data_options"})
"""Options that say where the samples are, which are compared themselves."""


@dataclass(frozen=True)
class Resume:
    """An earlier run, and where to go on with it.

    Attributes:
        folder: of the run.
        checkpoint: the folder of one of its checkpoints; None: the newest good one.
        auto: the run begins anew if there is none.
        again: it has lost ranks, and goes on by itself.
    """

    folder: Path
    checkpoint: Path | None = None
    auto: bool = False
    again: bool = False

    @property
    def goes_on(self) -> bool:
        """True if there is a checkpoint, or the run has come to its end."""
        return bool(checkpoints.present(self.folder / checkpoints.FOLDER)) or RunFolder(self.folder).finished

    @classmethod
    def find(cls, where: str, out: str | None) -> Resume | None:
        """Find the run that `--resume` names.

        Args:
            where: its folder, that of one of its checkpoints, or `AUTO`.
            out: the folder that `--out` names.

        Returns:
            The run; None: there is none yet, so that it begins.

        Raises:
            BadOption: `--out` is missing, or names another folder.
            BadRunFolder: there is no such run, or it has no checkpoint.
        """
        if where == AUTO:
            if out is None:
                raise BadOption("--resume auto goes on with the run in --out; name that folder too")
            # What a run has left that was killed before its first checkpoint makes way.
            return cls(Path(out), auto=True) if (Path(out) / CONFIG).is_file() else None
        path = Path(where)
        if path.parent.name == checkpoints.FOLDER and path.parent.is_dir() and not path.exists():
            there = ", ".join(one.name for one in checkpoints.present(path.parent)) or "none"
            raise BadRunFolder(f"there is no checkpoint {path.name} in {path.parent}; there are: {there}")
        refuse_no_folder(path)
        above = path.absolute().parent
        if path.name == checkpoints.FOLDER and not (path / CONFIG).is_file() and (above / CONFIG).is_file():
            path = above
        # A run folder may be in one of that name, too.
        inside = path.absolute().parent.name == checkpoints.FOLDER and not (path / CONFIG).is_file()
        checkpoint = path.resolve() if inside else None
        folder = path if checkpoint is None else path.absolute().parent.parent
        if out is not None and Path(out).resolve() != folder.resolve():
            raise BadOption(
                f"--out is {out}, but a run that is resumed goes on in its own folder, {folder}; leave "
                "--out out"
            )
        if not (folder / CONFIG).is_file():
            raise BadRunFolder(
                f"{folder} has no {CONFIG}, so it is no folder of a run; give one that 'tutti train' wrote"
            )
        found = cls(folder, checkpoint)
        if not found.goes_on:
            # A run that has only begun is to be waited for, not to be trained again.
            refuse_locked(folder)
            raise BadRunFolder(
                f"{folder} has no checkpoint to go on from; train again, with --checkpoint 1m or the like, "
                "or with --resume auto, which begins a run that has none"
            )
        return found


def way_on(folder: Path | str | None, objects: Collection[str], config: TrainConfig) -> str:
    """Return the command by which a run goes on.

    Args:
        folder: of the run.
        objects: the fields that were Python objects: no command can bring them back.
        config: of the run; one that names code needs --trust.
    """
    if objects:
        return f"the same call of tutti.train, with resume={str(folder)!r}"
    trust = " --trust" if code_named(config.as_json()) else ""
    return f"tutti train --resume {shlex.quote(str(folder))}{trust}"


def placed(before: TrainConfig, given: Collection[str]) -> TrainConfig:
    """Return the configuration of a run without that of its ranks' places which they will not have now.

    What one worker trained by itself, several go on with by strategy `sync`.

    Args:
        before: the configuration of the checkpoint's run.
        given: the fields that are given anew.
    """
    if before.strategy == SOLO and "strategy" not in given:
        before = replace(before, strategy=AUTO)
    if started_by().launcher is not Launcher.ALONE:  # Then so many ranks go on as it has started.
        return replace(before, workers="auto", hosts=None, threads=None)
    if "hosts" in given:
        return replace(before, workers="auto", threads=None)
    if "workers" in given:
        return replace(before, hosts=None, threads=None)
    if find_allocation(os.environ) is not None:
        return replace(before, workers="auto", hosts=SLURM if before.hosts else None, threads=None)
    return before


def as_decided(before: TrainConfig, now: TrainConfig) -> TrainConfig:
    """Return a configuration in which data whose streaming is left to us are streamed, or not, as before."""
    stream = before.data_options.get(_STREAM)
    if now.data_options.get(_STREAM) != AUTO or stream is None:
        return now
    return replace(now, data_options={**now.data_options, _STREAM: stream})


def check_same(before: TrainConfig, now: TrainConfig) -> None:
    """Refuse options that a run cannot go on with.

    Args:
        before: the configuration of the checkpoint's run.
        now: that of the run that is to go on with it.

    Raises:
        BadOption: the message names them all.
    """
    differ = [
        f"{option} {_shown(value)} (was {_shown(was)})"
        for f in fields(TrainConfig)
        if f.name not in MAY_DIFFER
        for option, was, value in _options(f.name, getattr(before, f.name), getattr(now, f.name))
        if value != was
    ]
    if differ:
        what = "it" if len(differ) == 1 else "them"
        given = any(f"(was {OBJECT}" in one for one in differ)  # nothing can be left out in place of that
        raise BadOption(
            f"a resumed run cannot go on with {', '.join(differ)}: that would be another training; "
            + (f"give {what} as at first" if given else f"leave {what} out")
            + ", or begin a new run in another folder"
        )


def check_own(checkpoint: Path, made_by: Json, run: Json) -> None:
    """Refuse a checkpoint that another run has made, whose folder was copied into that of this one.

    Args:
        checkpoint: its folder.
        made_by: the configuration of the run that has made it.
        run: the one that is in the folder of the run.

    Raises:
        BadCheckpoint: the message names the options that differ.
    """
    differ = [
        f"{option} {_shown(was)} (the run has {_shown(value)})"
        for option, was, value in _differing(made_by, run, MAY_DIFFER | _BY_SAMPLES)
    ]
    if differ:
        raise BadCheckpoint(
            f"{checkpoint} was made by another run, with {', '.join(differ)}: to go on from it would be "
            "another training; take it away, and the one before it is taken"
        )


def warn_of_another(resume: Resume, config: TrainConfig) -> None:
    """Warn that a run without a checkpoint makes way for one with other options.

    Args:
        resume: which run.
        config: of the one that begins in its place.
    """
    if started_by().rank:
        return
    with suppress(BadRunFolder):  # Of a damaged one nobody knows what it was.
        before, now = RunFolder(resume.folder).config(), config.as_json()
        differ = [
            f"{option} {_shown(value)} (was {_shown(was)})"
            for option, was, value in _differing(before, now, MAY_DIFFER)
            if value not in (None, AUTO)  # What is left open may become what it was.
        ]
        if differ:
            warn_on_stderr(
                f"the run in {resume.folder} has no checkpoint, and another one begins in its place, with "
                f"{', '.join(differ)}"
            )


def _differing(before: Json, now: Json, ignored: Collection[str]) -> Iterator[tuple[str, object, object]]:
    """Yield the options that two configurations both have, with different values."""
    for name in before:
        if name in now and name not in ignored:
            yield from (one for one in _options(name, before[name], now[name]) if one[1] != one[2])


def _options(name: str, before: object, now: object) -> Iterator[tuple[str, object, object]]:
    """Yield the options of the command line that a field is made of, with what they were and are."""
    if not (isinstance(before, dict) and isinstance(now, dict)):
        yield flag(name), before, now
        return
    for key in dict.fromkeys((*before, *now)):
        yield f"--{name.removesuffix('_options')}.{key}", before.get(key), now.get(key)


def _shown(value: object) -> str:
    return "none" if value is None else str(value)
