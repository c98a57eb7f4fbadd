"""Asking a run for another number of workers, while it trains. Needs no torch."""

from __future__ import annotations

import time
from contextlib import closing
from pathlib import Path
from typing import Final

from tutti.errors import BadOption, BadRunFolder
from tutti.records.folder_lock import is_locked
from tutti.records.resize_request import Asking
from tutti.records.run_folder import RunFolder, refuse_no_folder
from tutti.run.config import TrainConfig
from tutti.run.survival import STOP

_LOOK_S: Final = 0.05

_ABSENT_S: Final = 30.0
"""Time without anybody who writes its folder, after which a run has ended: lost ranks are replaced sooner."""


def resize(run: str | Path, workers: int) -> str:
    """Have a run go on with more or fewer workers, while it trains.

    It trains on until the new ranks have prepared themselves, and these go on from its last copy of the state
    in memory, as they would if a rank were lost. With strategy `sync` or `paramserver` the batch stays the
    same, and so does what is learned. It needs the run to be on this machine, and to survive the loss of
    ranks, by `on_failure`.

    Args:
        run: its folder.
        workers: that are to train, at least 1.

    Returns:
        What the run has said, once the new ranks have taken over.

    Raises:
        BadOption: there cannot be so many, or the run keeps no copies to go on from.
        BadRunFolder: there is no such run, or it has ended.
    """
    if workers < 1:
        raise BadOption(f"a run cannot go on with {workers} ranks; give at least 1")
    folder = Path(run)
    refuse_no_folder(folder)
    config = TrainConfig.from_json(RunFolder(folder).config())
    _refuse_ended(folder, workers, is_locked(folder))
    if config.on_failure == STOP or config.hosts is not None:
        why = "runs on several hosts" if config.hosts else "has no copies of its state in memory"
        raise BadOption(
            f"{folder} {why}, so it cannot change while it trains; stop it, by Ctrl-C or SIGTERM, and go on "
            f"with --resume {folder} and another -n; a run on one machine that is begun with --on-failure "
            "respawn or shrink can change"
        )
    with closing(Asking(folder, workers)) as asking:
        seen = time.monotonic()
        while (found := asking.answer()) is None:
            now = time.monotonic()
            seen = now if is_locked(folder) else seen
            _refuse_ended(folder, workers, now - seen < _ABSENT_S)
            time.sleep(_LOOK_S)
    assert found.answer is not None, "it has been waited for"
    if not found.agreed:
        raise BadOption(found.answer)
    return found.answer


def _refuse_ended(folder: Path, workers: int, runs: bool) -> None:
    if RunFolder(folder).finished or not runs:
        raise BadRunFolder(
            f"{folder} does not train now; with other ranks it goes on by: "
            f"tutti train --resume {folder} -n {workers}"
        )
