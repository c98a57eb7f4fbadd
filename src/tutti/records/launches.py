"""The launches that work on a farm, and the jobs that each of them has. Needs neither torch nor MPI.

    launches/ID/beat.json      replaced every few seconds: the `Beat` of a launch
    launches/ID/.lock          there as long as it lives, where the file system has locks
    launches/ID/events.jsonl   its own, so that no two hosts append to one file
    launches/ID/usage.jsonl    likewise
    claims/NAME/.0             a symbolic link to the ID of the launch that took the job first
    claims/NAME/.1             to that of the one that took it over, when the first had ended

A claim is one call of the system that fails if another launch was faster, on every file system. It is never
taken back: it holds as long as its launch lives. That is known at once where the lock is the same kernel's;
of another host, a free lock may mean only that locks do not reach so far, so its heart has to stop, too.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event, Thread
from typing import Final

from tutti.records.files import refusing, replace_file
from tutti.records.folder_lock import FolderLock, is_locked
from tutti.records.json_lines import Record, append_line, parse_record, to_json

LAUNCHES: Final = "launches"
CLAIMS: Final = "claims"
BEAT: Final = "beat.json"
EVENTS: Final = "events.jsonl"
USAGE: Final = "usage.jsonl"

BEAT_S: Final = 5.0
"""The time between two beats."""

PATIENCE_S: Final = 45.0
"""Longest silence of a heart on another host: more than an NFS client may see an old file."""

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class Beat(Record):
    """A sign of life of a launch.

    Attributes:
        process: its number on its host.
        host: the name of that.
        kernel: which runs there, since it was booted.
        locks: whether its file system has locks.
        count: of beats before.
        over: it has ended.
        cores: the logical CPUs that it may use.
    """

    process: int
    host: str
    kernel: str
    locks: bool
    count: int = 0
    over: bool = False
    cores: tuple[int, ...] = ()


class Launches:
    """The launches that have worked on a farm, as one who looks on sees them.

    Args:
        farm: its folder.
    """

    def __init__(self, farm: Path) -> None:
        self._farm, self._kernel = farm, _kernel()
        self._heard: dict[str, tuple[int, float]] = {}

    @property
    def names(self) -> list[str]:
        """The IDs of all launches, sorted."""
        folder = self._farm / LAUNCHES
        return sorted(os.listdir(folder)) if folder.is_dir() else []

    def beats(self) -> dict[str, Beat]:
        """Read the newest beat of each launch, by its ID."""
        found = {name: self._beat(name) for name in self.names}
        return {name: beat for name, beat in found.items() if beat is not None}

    def _beat(self, launch: str) -> Beat | None:
        try:
            return parse_record((self._farm / LAUNCHES / launch / BEAT).read_bytes(), Beat)
        except (OSError, ValueError):
            return None

    def alive(self, launch: str) -> bool:
        """Tell whether a launch may still work; of one on another host that is certain only after a while."""
        folder, beat = self._farm / LAUNCHES / launch, self._beat(launch)
        # It makes no claim before its first beat.
        if beat is None or beat.over:
            return False
        if is_locked(folder):
            return True
        if beat.locks and beat.kernel == self._kernel:
            return False
        # By this clock alone: those of hosts differ.
        count, since = self._heard.get(launch, (-1, 0.0))
        if count != beat.count:
            count, since = self._heard[launch] = beat.count, time.monotonic()
        return time.monotonic() - since < PATIENCE_S

    def owner(self, job: str) -> str | None:
        """Return the launch that took a job last; None: none has."""
        folder = self._farm / CLAIMS / job
        taken = _times_taken(folder)
        return os.readlink(_claim(folder, taken - 1)) if taken else None


class Launch:
    """A launch of this process, from here to the end of the context.

    Args:
        farm: the folder of the farm.

    Attributes:
        name: its ID.
        events: the file for what happens.
        usage: the file for samples of its cores.

    Raises:
        BadRunFolder: the folder cannot be written.
    """

    def __init__(self, farm: Path) -> None:
        host = re.sub(r"[^A-Za-z0-9-]+", "-", socket.gethostname())
        self.name = f"{time.strftime('%Y%m%d-%H%M%S')}-{host}-{os.getpid()}-{secrets.token_hex(2)}"
        self._farm, self._folder = farm, farm / LAUNCHES / self.name
        self.events, self.usage = self._folder / EVENTS, self._folder / USAGE
        self._others, self._claims = Launches(farm), dict[str, int]()
        with refusing(self._folder):
            self._folder.mkdir(parents=True)
        self._lock = FolderLock(self._folder)
        locks = self._lock.problem is None
        cores = tuple(sorted(os.sched_getaffinity(0)))
        self._beat = Beat(os.getpid(), socket.gethostname(), _kernel(), locks, cores=cores)
        with refusing(self._folder):
            self._write_beat()
            # By the clock of the file system, as errors of jobs have their times.
            self._began = os.stat(self._folder / BEAT).st_mtime_ns
        self._over = Event()
        self._heart = Thread(target=self._beat_on, name="tutti-heart", daemon=True)

    def __enter__(self) -> Launch:
        self._heart.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Leave all jobs to others."""
        if self._over.is_set():
            return
        self._over.set()
        self._heart.join()
        self._beat = replace(self._beat, over=True)
        # Where that cannot be written, the lock or the silence tells.
        with suppress(OSError):
            self._write_beat()
        self._lock.__exit__()

    def claim(self, job: str) -> bool:
        """Take a job, which is this launch's alone then; False: another one that lives has it.

        Raises:
            BadRunFolder: the folder cannot be written.
        """
        folder = self._farm / CLAIMS / job
        with refusing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            taken = _times_taken(folder)
            if taken:
                owner = os.readlink(_claim(folder, taken - 1))
                if owner == self.name:
                    return True
                if self._others.alive(owner):
                    return False
            try:
                os.symlink(self.name, _claim(folder, taken))
            except FileExistsError:
                return False
        self._claims[job] = taken
        return True

    def shares_cores(self) -> bool:
        """Tell whether another launch works on the farm with cores of this one."""
        mine, others = self._beat, self._others
        return any(
            beat.kernel == mine.kernel and {*beat.cores} & {*mine.cores} and others.alive(name)
            for name, beat in others.beats().items()
            if name != self.name
        )

    def is_news(self, job: str, error: Path) -> bool:
        """Tell whether a job has failed in the hands of another launch while this one was there.

        Args:
            job: its name.
            error: the file that says why it has failed.
        """
        folder = self._farm / CLAIMS / job
        taken = _times_taken(folder)
        if not taken:
            return False
        newest = _claim(folder, taken - 1)
        try:
            failed, claimed = os.stat(error).st_mtime_ns, os.lstat(newest).st_mtime_ns
        except FileNotFoundError:
            return False
        # That of an earlier try stays until the next one begins.
        return failed >= claimed and (failed >= self._began or self._others.alive(os.readlink(newest)))

    def note(self, event: Record) -> None:
        """Add an event to those before.

        Raises:
            BadRunFolder: it cannot be written.
        """
        # Nothing is derived from it but figures, so it is not flushed to the disk.
        with refusing(self.events):
            append_line(self.events, event, flush=False)

    def _beat_on(self) -> None:
        while not self._over.wait(BEAT_S):
            self._beat = replace(self._beat, count=self._beat.count + 1)
            # A disk that is full for a moment is no reason to die; the next beat may succeed.
            with suppress(OSError):
                self._write_beat()

    def _write_beat(self) -> None:
        replace_file(self._folder / BEAT, to_json(self._beat).encode() + b"\n", flush=False)


def _times_taken(folder: Path) -> int:
    try:
        return sum(name.startswith(".") for name in os.listdir(folder))
    except FileNotFoundError:
        return 0


def _claim(folder: Path, number: int) -> Path:
    return folder / f".{number}"


def _kernel() -> str:
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return socket.gethostname()
