"""Runs commands as a user types them, within a time."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import subprocess
import sysconfig
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.preloaded import command, interpreter

LIMIT_S = 200.0
"""Each takes a few seconds on a quiet machine, and up to a hundred where ten others want each core."""

BIN = Path(sysconfig.get_path("scripts"))
MPI = {
    "OMPI_MCA_osc": "^ucx",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_btl": "self,sm",
    "OMPI_MCA_mpi_yield_when_idle": "1",
}
"""What the Open MPI of pip needs where ranks outnumber cores."""


FORKED: dict[str, Callable[[], list[str]]] = {
    "tutti": command,
    "python": lambda: interpreter(starts_ranks=True),
}
"""By the first word of a line, what is started in its place."""


@dataclass(frozen=True)
class Done:
    """A command that has ended."""

    code: int
    out: str
    err: str

    @property
    def figures(self) -> Any:
        """The last line that a program has printed, as JSON."""
        return json.loads(self.out.splitlines()[-1])


@contextmanager
def started(line: str, folder: Path, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Start a command in a folder; whatever is left of it at the end is killed.

    Python has torch imported already, but under launchers that are not tutti's, and where a line begins with
    "real": importing it is most of the time of a short command.
    """
    words = shlex.split(line)
    if words[0] in FORKED:
        words[:1] = FORKED[words[0]]()
    elif words[0] == "real":
        del words[0]
    if words[0] == "mpirun":
        words[1:1] = ["--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    settings = {**os.environ, **MPI, "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}", **environment}
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def run(line: str, folder: Path, *, code: int = 0, **environment: str) -> Done:
    """Run a command in a folder; it must end with this exit code."""
    with started(line, folder, **environment) as process:
        out, err = process.communicate(timeout=LIMIT_S)
    assert process.returncode == code, f"{line} ended with {process.returncode}\n{out}\n{err}"
    return Done(process.returncode, out, err)


def program(text: str, folder: Path, launcher: str = "python") -> Done:
    """Save a program in a folder and run it there."""
    (folder / "program.py").write_text(text)
    return run(f"{launcher} program.py", folder)


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until something is true, at most as long as a command may take."""
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.05)


def summary(run_folder: Path) -> Any:
    return json.loads((run_folder / "summary.json").read_text())


def history(run_folder: Path) -> list[Any]:
    return json_lines(run_folder / "history.jsonl")


def json_lines(file: Path) -> list[Any]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def weights_sha256(run_folder: Path) -> str:
    return sha256(run_folder / "weights.safetensors")


def apart(one: Path, other: Path) -> float:
    """The largest deviation of the weights of two runs, relative to the largest weight."""
    first, second = (load_file(folder / "weights.safetensors") for folder in (one, other))
    assert first.keys() == second.keys()
    largest = max(float(value.abs().max()) for value in first.values())
    return max(float((value - second[name]).abs().max()) for name, value in first.items()) / largest


def torch_program(*parts: str) -> str:
    """A program from its parts, with the imports that all of them need."""
    return "\n".join(["import json, torch, tutti", "from torch import nn", *parts])
