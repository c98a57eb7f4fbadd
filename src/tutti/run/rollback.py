"""Takes a run folder back whose run ends in its first epoch, however it ends, where no launcher of ours can.

    rank 0 ──pipe── a process of its own, nobody's child: the pipe ends when rank 0 does

An MPI launcher kills rank 0 as soon as another rank fails, before it comes to any clean-up.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from tutti.errors import BadRunFolder
from tutti.records.folder_lock import FolderLock
from tutti.records.run_folder import RunFolder

_PROGRAM: Final = (
    "import json, sys; given = json.loads(sys.argv[1]); sys.path[:] = given['path']; "
    "from tutti.run.rollback import main; main(given['folder'])"
)
_KEPT: Final = ("PATH", "LD_LIBRARY_PATH")
_ROUNDS: Final = 20
_ROUND_S: Final = 0.1


def take_back_after_me(folder: RunFolder) -> None:
    """Once this process has ended, remove the folder if the run has completed no epoch by then."""
    given = {"path": [str(place) for place in sys.path], "folder": str(folder.path.absolute())}
    # The other end stays open until this process ends.
    reading, _ = os.pipe2(os.O_CLOEXEC)
    try:
        subprocess.run(
            [sys.executable, "-P", "-c", _PROGRAM, json.dumps(given)],
            stdin=reading,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # It is no rank of the MPI job, as whose part it would be ended.
            env={name: os.environ[name] for name in _KEPT if name in os.environ},
            start_new_session=True,
            check=False,
        )
    finally:
        os.close(reading)


def main(folder: str) -> None:
    """Wait for the end of the standard input, then take the folder back."""
    if os.fork():
        os._exit(0)
    sys.stdin.buffer.read()
    run = RunFolder(Path(folder))
    if run.begun:
        return
    # Other ranks may leave a last sign of life.
    for _ in range(_ROUNDS):
        # Gone, or another job has it by now.
        with suppress(BadRunFolder), FolderLock(run.path):
            run.remove()
        time.sleep(_ROUND_S)
        if not run.path.exists():
            return
