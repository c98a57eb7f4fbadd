"""A training as a process: what it says on standard error, how it ends, and what it leaves. No torch."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Final

import psutil

from tutti.launch.orphans import adopt_orphans, die_with_parent

_LOSS: Final = re.compile(r"lost ranks? ([\d, ]+): (.*)")
_GOES_ON: Final = "; going on with "
_SHARED: Final = Path("/dev/shm")
_LEAVING_S: Final = 3.0
"""Time of what a training has started to be gone after it."""

_POLL_S: Final = 0.02
_PR_SET_CHILD_SUBREAPER: Final = 36


@dataclass(frozen=True)
class LossSaid:
    """What a training has said of ranks that were lost.

    Attributes:
        at: when, by the monotonic clock.
        ranks: which.
        why: the cause.
        goes_on: whether it goes on.
    """

    at: float
    ranks: tuple[int, ...]
    why: str
    goes_on: bool

    @classmethod
    def in_line(cls, line: str, at: float) -> LossSaid | None:
        """What a line of standard error says; None: it is about something else."""
        found = _LOSS.search(line)
        if found is None:
            return None
        why, comma, _ = found[2].partition(_GOES_ON)
        return cls(at, tuple(int(one) for one in found[1].split(",")), why, bool(comma))


class Training:
    """A training that runs.

    Args:
        words: those after `tutti`, but for `--out`.
        folder: of the run.
        scratch: a folder for its temporary files.
        quiet: keep what it prints to itself.

    Attributes:
        folder: the same.
        process: that of the command.
        losses: what it has said of lost ranks so far.
        lines: its last lines on standard error.
    """

    def __init__(self, words: Sequence[str], folder: Path, scratch: Path, quiet: bool = False) -> None:
        self.folder = folder
        self.losses: list[LossSaid] = []
        self.lines: list[str] = []
        self._quiet = quiet
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tutti", *words, "--out", str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if quiet else None,
            stderr=subprocess.PIPE,
            env=_environment(scratch),
            # Whatever this process ends by, its training ends with it, and the guard sees to the ranks.
            preexec_fn=partial(die_with_parent, os.getpid()),
        )
        self._reader = threading.Thread(target=self._read, args=(self.process.stderr,), daemon=True)
        self._reader.start()

    def _read(self, pipe: IO[bytes]) -> None:
        with pipe:
            for data in pipe:
                line = data.decode(errors="replace")
                if (loss := LossSaid.in_line(line.rstrip("\n"), time.monotonic())) is not None:
                    self.losses.append(loss)
                self.lines = [*self.lines[-199:], line]
                if not self._quiet:
                    sys.stderr.write(line)
                    sys.stderr.flush()

    @property
    def over(self) -> bool:
        """True if it has ended."""
        return self.process.poll() is not None

    def wait(self) -> int:
        """Wait for its end, and for its last line; returns the exit code."""
        code = self.process.wait()
        # Whoever it has left behind may hold the pipe.
        self._reader.join(_LEAVING_S)
        return code

    def end(self) -> None:
        """End it at once, and all that it has started."""
        with suppress(psutil.NoSuchProcess):
            for one in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(signal.SIGKILL)
        self.process.kill()


class Leavings:
    """What is there after a training that was not there before it: processes and files.

    Args:
        scratch: the folder of its temporary files.
    """

    def __init__(self, scratch: Path) -> None:
        self._scratch = scratch
        self._processes = {one.pid for one in psutil.Process().children(recursive=True)}
        self._shared = set(_own_files(_SHARED))

    def found(self) -> list[str]:
        """Describe what is left a while after the end; the processes among it are ended."""
        deadline = time.monotonic() + _LEAVING_S
        while (left := self._new_processes()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        said = []
        for one in left:
            with suppress(psutil.NoSuchProcess):
                said.append(f"process {one.pid} ({one.name()})")
                one.kill()
        return [*said, *map(str, self._scratch.iterdir())]

    def shared(self) -> list[str]:
        """The files in shared memory that are new, and that nobody uses: it may be another program's."""
        new = [path for path in _own_files(_SHARED) if path not in self._shared]
        return [str(path) for path in new if not _is_used(path)]

    def _new_processes(self) -> list[psutil.Process]:
        found = []
        for one in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                if one.pid in self._processes:
                    continue
                if one.status() == psutil.STATUS_ZOMBIE:
                    with suppress(ChildProcessError):
                        os.waitpid(one.pid, os.WNOHANG)
                else:
                    found.append(one)
        return found


def _environment(scratch: Path) -> dict[str, str]:
    """The environment of a training whose temporary files lie in a folder of its own."""
    # torch keeps what it compiles from run to run, beside the temporary files if nobody says where.
    kept = {"TORCHINDUCTOR_CACHE_DIR": os.path.join(tempfile.gettempdir(), f"torchinductor_{os.geteuid()}")}
    return {**kept, **os.environ, "TMPDIR": str(scratch)}


@contextmanager
def orphans_adopted() -> Iterator[None]:
    """Be the parent of what a training leaves behind."""
    adopt_orphans()
    try:
        yield
    finally:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def _own_files(folder: Path) -> list[Path]:
    found = []
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                if path.stat().st_uid == os.geteuid():
                    found.append(path)
    return found


def _is_used(path: Path) -> bool:
    """Tell whether a process has the file mapped: then it is that of a program that runs beside."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            if str(path) in maps.read_text():
                return True
    return False
