"""The last copy of the state in memory, written to the disk when nobody goes on from it. No torch.

memory    copy 1 │ copy 2        its files are those of a checkpoint
disk      checkpoints/step-...   what `--resume` goes on from
"""

from __future__ import annotations

from pathlib import Path

from tutti.checkpoint.memory_files import MemoryPlace
from tutti.checkpoint.writer_process import Order, write_checkpoint
from tutti.records.checkpoints import newest, tidy


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
    folder.mkdir(parents=True, exist_ok=True)
    process, descriptor = place.copies[number - 1]
    write_checkpoint(
        Order(
            memory=f"/proc/{process}/fd/{descriptor}",
            folder=folder,
            inode=folder.stat().st_ino,
            attempt="last",
            files=found["files"],
            host=0,
            hosts=1,
            step=step,
            ranks=found["ranks"],
            score=None,
            keep=keep,
        )
    )
    tidy(folder, step, keep)
    return step
