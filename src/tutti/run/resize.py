"""Requests for another number of workers, while a run trains. Needs no torch."""

from __future__ import annotations

import shlex
import time
from pathlib import Path
from typing import Final

from tutti.errors import BadOption, BadRunFolder
from tutti.records.folder_lock import is_locked
from tutti.records.heartbeat import FINISHED
from tutti.records.resize_request import REQUEST, read_request, remove_request, request_workers
from tutti.records.run_folder import CONFIG, RunFolder, refuse_no_folder
from tutti.run.config import STOP, TrainConfig

_LOOK_S: Final = 0.05

_ABSENT_S: Final = 120.0
"""Time without a sign of its ranks after which a run has ended: mpirun takes its time to start others."""


def resize(run: str | Path, workers: int) -> str:
    """Change the number of workers of a run while it trains.

    The run copies its state at the next step, and new ranks continue from there. With strategy `sync` or
    `paramserver` the batch stays the same, and so does the result. It needs the run to be on this machine,
    the first of its `hosts`, and to survive the loss of ranks, by `on_failure`. Hosts take as many workers as
    they have places. Do not call it in the run itself, which it would keep waiting.

    Args:
        run: its folder.
        workers: the new number of workers, at least 1.

    Returns:
        The run's answer, once the new ranks start, or as it has that number already.

    Raises:
        BadOption: there cannot be that many, or the run keeps no copies to continue from.
        BadRunFolder: there is no such run, it has ended, or another request is pending.
    """
    if workers < 1:
        raise BadOption(f"a run cannot train on {workers} ranks; give at least 1")
    path = Path(run)
    if not (path / CONFIG).is_file():
        raise BadRunFolder(
            f"{path} is no folder of a run, as it has no {CONFIG}; give the folder that 'tutti train' "
            "writes, or if a run is just starting there, ask again once it trains"
        )
    folder = RunFolder(path)
    _refuse_ended(folder, workers)
    if TrainConfig.from_json(folder.config()).on_failure == STOP:
        raise BadOption(
            f"{path} was started without --on-failure, so it keeps no copies of its state for other ranks. "
            "Stop it, by Ctrl-C or SIGTERM, and continue it by: tutti train --resume "
            f"{shlex.quote(str(path))} -n {workers} --on-failure respawn"
        )
    if not request_workers(path, workers):
        raise BadRunFolder(
            f"another 'tutti resize' of {path} waits for an answer; wait for it, or remove "
            f"{path / REQUEST} if none is running"
        )
    try:
        request = read_request(path)
        while request is not None and not request.answer:
            _refuse_ended(folder, workers)
            time.sleep(_LOOK_S)
            request = read_request(path)
    finally:
        remove_request(path)
    if request is None:
        refuse_no_folder(path)
        raise BadRunFolder(
            f"{path / REQUEST} was removed before there was an answer in it; see what the run has printed"
        )
    if not request.agreed:
        raise BadOption(request.answer)
    return request.answer


def _refuse_ended(folder: RunFolder, workers: int) -> None:
    """Refuse a run that does not train."""
    refuse_no_folder(folder.path)
    again = f"tutti train --resume {shlex.quote(str(folder.path))}"
    if folder.finished:
        raise BadRunFolder(f"{folder.path} has finished, so its ranks are gone; start another run")
    if is_locked(folder.path):
        return
    beats = folder.heartbeats().records
    lives = any(one.time > time.time() - _ABSENT_S for one in beats)
    if not lives or any(one.rank == 0 and one.state == FINISHED for one in beats):
        raise BadRunFolder(f"{folder.path} does not train now; continue it by: {again} -n {workers}")
