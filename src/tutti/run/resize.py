"""Asking a run for another number of workers, while it trains. Needs no torch."""

from __future__ import annotations

import operator
import shlex
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Final, SupportsIndex

from tutti.errors import BadOption, BadRunFolder, UserError
from tutti.launch.launcher import Launcher, started_by
from tutti.records import checkpoints
from tutti.records.farm_folder import FARM
from tutti.records.folder_lock import is_locked
from tutti.records.heartbeat import FINISHED
from tutti.records.resize_request import GONE_S, Asking, somebody_answers
from tutti.records.run_folder import CONFIG, RunFolder, refuse_no_folder
from tutti.run.config import STOP, TrainConfig
from tutti.run.train_job import TrainJob
from tutti.terminal import warn_on_stderr

_LOOK_S: Final = 0.05

_AGAIN_S: Final = 60.0
"""The time after a refusal in which a rank does not ask for as many workers again."""

_ABSENT_S: Final = 30.0
"""Time without anybody who writes its folder, after which a run has ended: lost ranks are replaced sooner."""

_UNHEARD_S: Final = 2.0
"""Likewise, where nobody is there who would answer: a run that is starting looks for requests by then."""


def resize(run: str | Path, workers: int) -> str:
    """Have a run go on with more or fewer workers, while it trains.

    It trains on until the new ranks have prepared themselves, and these go on from a copy of its state in
    memory that is taken then. With strategy `sync` or `paramserver` the batch stays the same, and so does
    what is learned. It needs the run to be on this machine, the first of its `hosts`, and to survive the loss
    of ranks, by `on_failure`. Hosts take as many workers as they have places. In a callback, which would keep
    the run from copying its state while it waits, call `course.resize(workers)` instead.

    Args:
        run: its folder.
        workers: that are to train, at least 1.

    Returns:
        What the run has said, once the new ranks have taken over, or as it has so many already.

    Raises:
        BadOption: there cannot be so many, or the run keeps no copies to go on from.
        BadRunFolder: there is no such run, or it has ended.
    """
    count = counted(workers)
    if started_by().launcher is Launcher.TUTTI and threading.current_thread() is threading.main_thread():
        raise BadOption(
            "a rank that waits for others to take its place does not train, and so the run would not come to "
            "that; in a callback call course.resize(workers), which does not wait"
        )
    path = Path(run)
    folder = _found(path)
    seen = _last_seen(folder, count, time.monotonic())
    config = TrainConfig.from_json(folder.config())
    if config.on_failure == STOP:
        raise BadOption(_unchangeable(path, config, count))
    with closing(Asking(path, count)) as asking:
        while (found := asking.answer()) is None:
            seen = _last_seen(folder, count, seen)
            time.sleep(_LOOK_S)
    assert found.answer is not None, "it has been waited for"
    if not found.agreed:
        raise BadOption(found.answer)
    for text in found.warnings:
        warn_on_stderr(text)
    return found.answer


class RankAsks:
    """Asks from within a run, on its rank 0, for another number of workers, and does not wait.

    What the run refuses it warns of itself. The same number is then asked for no more for a while, as a
    callback may ask in every step.

    Args:
        job: the run.
    """

    def __init__(self, job: TrainJob) -> None:
        self._job, self._warned = job, ""
        self._waits: threading.Thread | None = None
        self._refused, self._until = 0, 0.0

    def __call__(self, workers: int) -> None:
        """Ask for so many, unless an answer is still to come."""
        if self._waits is not None and self._waits.is_alive():
            return
        try:
            count = counted(workers)
            if count == self._refused and time.monotonic() < self._until:
                return
            folder = self._folder(count)
        except UserError as error:
            self._warn(str(error))
            return
        self._waits = threading.Thread(target=self._ask, args=(folder, count), daemon=True)
        self._waits.start()

    def _folder(self, workers: int) -> Path:
        memory = self._job.memory
        folder = None if memory is None else memory.folder
        if folder is None and (memory is not None or not self._job.write):
            raise BadOption("a run without a folder cannot change its number of ranks; name one with out=...")
        if folder is None:
            config = self._job.config
            raise BadOption(_unchangeable(Path(config.out or "RUN"), config, workers))
        return folder

    def _ask(self, folder: Path, workers: int) -> None:
        """Ask, and wait for the answer; where others take over, this process ends meanwhile."""
        try:
            # Of ranks that were lost while one of them asked the process may not be gone yet.
            with closing(Asking(folder, workers, GONE_S)) as asking:
                while (found := asking.answer()) is None:
                    time.sleep(_LOOK_S)
        except BadRunFolder as error:
            self._warn(str(error))
        else:
            if not found.agreed:
                self._refused, self._until = workers, time.monotonic() + _AGAIN_S

    def _warn(self, text: str) -> None:
        if text != self._warned:
            self._warned = text
            warn_on_stderr(text)


def counted(workers: SupportsIndex) -> int:
    """Return a number of workers as an int.

    Raises:
        BadOption: it is none.
    """
    if isinstance(workers, bool) or not isinstance(workers, SupportsIndex):
        raise BadOption(f"workers has to be a whole number, not {workers!r}")
    count = operator.index(workers)
    if count < 1:
        raise BadOption(f"a run cannot go on with {count} ranks; give at least 1")
    return count


def _found(path: Path) -> RunFolder:
    """Return the folder of a run.

    Raises:
        BadRunFolder: it is none, or not yet.
    """
    if not path.exists():
        raise BadRunFolder(
            f"run folder {path} does not exist; give the folder that 'tutti train' writes, or if the run is "
            "just starting, ask again once it trains"
        )
    refuse_no_folder(path)
    if (path / FARM).exists():
        raise BadRunFolder(
            f"{path} is the folder of many runs, which share the cores; only a single run, of 'tutti train', "
            "can change its number of ranks"
        )
    above = path.absolute()
    while checkpoints.FOLDER in (above.name, above.parent.name):
        above = above.parent
        if (above / CONFIG).is_file():
            raise BadRunFolder(f"{path} is no run, but has its checkpoints; give the run's folder, {above}")
    if not (path / CONFIG).exists():
        raise BadRunFolder(
            f"{path} has no {CONFIG}; if a run is just starting there, ask again once it trains, and else "
            "give the folder that 'tutti train' writes"
        )
    return RunFolder(path)


def _unchangeable(path: Path, config: TrainConfig, workers: int) -> str:
    """Say why a run cannot change while it trains, and what to do."""
    hosts = "" if config.hosts is None else " --hosts ..."
    way = f"tutti train --resume {shlex.quote(str(path))} -n {workers}{hosts} --on-failure respawn"
    return (
        f"{path} was started without --on-failure, so it keeps no copies of its state from which others "
        f"could go on. Stop it, by Ctrl-C or SIGTERM, and go on by: {way}"
    )


def _last_seen(folder: RunFolder, workers: int, seen: float) -> float:
    """Return the time when somebody was there last who writes the folder of a run.

    Args:
        folder: of the run.
        workers: that are to train.
        seen: that time by the last look.

    Raises:
        BadRunFolder: the run has ended, or its folder is gone.
    """
    refuse_no_folder(folder.path)
    again = f"tutti train --resume {shlex.quote(str(folder.path))}"
    if folder.finished:
        raise BadRunFolder(f"{folder.path} has finished; to train longer: {again} --epochs ...")
    answered = somebody_answers(folder.path)
    if answered or is_locked(folder.path):
        return time.monotonic()
    absent_s = _ABSENT_S if answered is None else _UNHEARD_S
    if time.monotonic() - seen > absent_s or _has_stopped(folder):
        raise BadRunFolder(
            f"{folder.path} does not train now; with {workers} rank{'' if workers == 1 else 's'} it goes on "
            f"by: {again} -n {workers}"
        )
    return seen


def _has_stopped(folder: RunFolder) -> bool:
    """Tell whether the ranks of a run have ended without being lost, or long ago."""
    try:
        beats = folder.heartbeats().records
    except FileNotFoundError:  # The folder is being removed or renamed.
        return False
    silent = bool(beats) and max(one.time for one in beats) < time.time() - _ABSENT_S
    return silent or any(one.rank == 0 and one.state == FINISHED for one in beats)
