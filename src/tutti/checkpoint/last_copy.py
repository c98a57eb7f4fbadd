"""The last copy of the state in memory, written to the disk when nobody goes on from it. No torch.

memory    copy 1 │ copy 2        its files are those of a checkpoint
disk      checkpoints/step-...   what `--resume` goes on from
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from tutti.checkpoint.memory_files import MemoryPlace
from tutti.records.checkpoints import (
    Manifest,
    commit,
    newest,
    remove_unfinished,
    tidy,
    unfinished_folder,
    write_file,
)
from tutti.records.json_lines import Json

_ATTEMPT: Final = "last"


def write_last_copy(place: MemoryPlace, folder: Path, keep: int) -> int | None:
    """Write the last copy as a checkpoint, if that is of more steps than those on the disk.

    Args:
        place: of the memory, which no rank changes any more.
        folder: of the run's checkpoints.
        keep: how many of them are kept, as by `--keep`.

    Returns:
        The step of the checkpoint that was written; None: there was nothing to write.

    Raises:
        OSError: it cannot be written.
        BadCheckpoint: a newer version of tutti has written one on the disk.
    """
    described = place.described()
    if not described:
        return None
    number, found = described[0]
    step = int(found["step"])
    there, _ = newest(folder)
    if there is not None and there.manifest.step >= step:
        return None
    memory = place.copies[number - 1].open()
    try:
        _write(memory, found, folder)
    finally:
        os.close(memory)
    tidy(folder, step, keep)
    return step


def _write(memory: int, found: Json, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    remove_unfinished(folder)
    unfinished = unfinished_folder(folder, found["step"], _ATTEMPT)
    try:
        unfinished.mkdir()
        files = {
            name: write_file(unfinished / name, memory, start, size)
            for name, (start, size) in found["files"].items()
        }
        commit(unfinished, Manifest(found["step"], found["ranks"], files))
    except OSError:
        remove_unfinished(folder)  # Nobody goes on with it, and on a full disk it is in the way.
        raise
