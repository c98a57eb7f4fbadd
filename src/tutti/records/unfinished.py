"""Folders beside a place in which it is being written. One whose program was killed is removed by the next.

.NAME.unfinished-XXXXXXXX/    locked by the program that writes in it, as long as that lives
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path


@contextmanager
def unfinished_folder(place: Path) -> Iterator[Path]:
    """Make an empty folder beside a place, to be removed with all that is still in it at the end.

    Args:
        place: what is to be written; its own folder is there.

    Raises:
        OSError: no folder can be made there.
    """
    _remove_those_of_the_dead(place)
    while True:
        with (
            tempfile.TemporaryDirectory(dir=place.parent, prefix=f".{place.name}.unfinished-") as name,
            _locked(Path(name)),
        ):
            # Another program may have removed it before it was locked.
            if os.path.isdir(name):
                yield Path(name)
                return


def _remove_those_of_the_dead(place: Path) -> None:
    """Remove the folders for a place that nobody has locked."""
    mine = re.compile(rf"\.{re.escape(place.name)}\.unfinished-\w{{8}}")
    for name in os.listdir(place.parent):
        if mine.fullmatch(name) is None:
            continue
        with _locked(place.parent / name) as locked:
            if locked:
                shutil.rmtree(place.parent / name, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[bool]:
    """Lock a folder, and tell whether it is: others may have it, and a file system may have no locks."""
    with ExitStack() as stack:
        locked = False
        with suppress(OSError):
            opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            stack.callback(os.close, opened)
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        yield locked
