"""The launches that work on a farm, and each one's jobs. Needs neither torch nor MPI.

    launches/ID/.lock          locked as long as it lives: `tutti.records.folder_lock`
    launches/ID/events.jsonl   its own, so that no two hosts append to one file
    launches/ID/usage.jsonl    likewise
    jobs/NAME/.claim           locked by the launch that has the job

The kernel, or the server of a shared file system, releases a launch's locks when it ends in any way.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from pathlib import Path
from typing import Final

from tutti.errors import BadRunFolder
from tutti.records.files import refusing
from tutti.records.folder_lock import LOCK, FolderInUse, FolderLock
from tutti.records.json_lines import Record, append_line

LAUNCHES: Final = "launches"
JOBS: Final = "jobs"
CLAIM: Final = ".claim"
EVENTS: Final = "events.jsonl"
USAGE: Final = "usage.jsonl"


def all_launches(farm: Path) -> list[Path]:
    """Return the folders of all launches that have begun, sorted."""
    return sorted(path.parent for path in (farm / LAUNCHES).glob(f"*/{LOCK}"))


class Launch:
    """A launch of this process on a farm, until the end of the context; its files are named above."""

    def __init__(self, farm: Path) -> None:
        host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname())
        self.name = f"{time.strftime('%Y%m%d-%H%M%S')}-{host}-{os.getpid()}-{secrets.token_hex(2)}"
        self._farm, self._folder = farm, farm / LAUNCHES / self.name
        self.events, self.usage = self._folder / EVENTS, self._folder / USAGE
        self._claims: dict[str, FolderLock] = {}
        with refusing(self._folder):
            self._folder.mkdir(parents=True)
            self._lock = FolderLock(self._folder)
            # By the clock of the file system, as errors of jobs have their times.
            self._began = os.stat(self._folder / LOCK).st_mtime_ns

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()
        for claim in self._claims.values():
            claim.release()

    def claim(self, job: str) -> bool:
        """Take a job for this launch only, until it is released; False: another launch has it."""
        if job in self._claims:
            return True
        folder = self._farm / JOBS / job
        with refusing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        try:
            claim = FolderLock(folder, name=CLAIM)
        except FolderInUse:
            return False
        if claim.problem is not None:
            claim.release()
            raise BadRunFolder(
                f"the file system of {self._farm} has no locks ({claim.problem}); name another folder "
                "with --out"
            )
        self._claims[job] = claim
        return True

    def release(self, job: str) -> None:
        """Leave a job to other launches."""
        self._claims.pop(job).release()

    def is_news(self, error: Path) -> bool:
        """Return whether the file with a job's error was written since this launch began."""
        try:
            return error.stat().st_mtime_ns >= self._began
        except FileNotFoundError:
            return False

    def note(self, event: Record) -> None:
        """Append an event."""
        # Nothing is derived from it but figures, so it is not flushed to the disk.
        with refusing(self.events):
            append_line(self.events, event, flush=False)
