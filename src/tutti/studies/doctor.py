"""The inventory of this machine for training, and what to run on it. Needs no torch: a rank reports on it."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import TYPE_CHECKING

from tutti.errors import TuttiError
from tutti.launch.cores import Cores, allowed_cores, cpuinfo, processor_flags
from tutti.launch.mpi_library import give_home
from tutti.launch.placement import Placement, place_ranks
from tutti.launch.start import start

if TYPE_CHECKING:
    from tutti.comm.base import Communicator

LENGTHS = (1_000, 250_000, 4_000_000)
"""Lengths of the vectors (fp32) whose all-reduce is timed: 4 KB, 1 MB, 16 MB."""

ROUNDS = 5

UNITS = ("amx_tile", "amx_bf16", "amx_int8", "avx512f", "avx512_bf16", "avx2", "sve", "bf16", "asimd")
"""Features of processors for matrices and vectors, as the kernel calls them."""

PATIENCE_S = 60
"""Seconds to wait for another program's answer (MPI's, the GPU driver's)."""

MPI_QUESTION = """\
from tutti.comm.mpi.library import library
from tutti.launch.world import leave_world_of_one
print(library())
leave_world_of_one()
"""


Finding = tuple[str, str]
"""One line of the doctor's report: a name and a value."""


@dataclass(frozen=True)
class Measured:
    """The measurements of two ranks.

    Attributes:
        torch: its version.
        cuda: the version of CUDA that it was built with, or nothing.
        gpu: the GPU that torch can use, or nothing.
        seconds: the median time of one all-reduce, for each of `LENGTHS`.
    """

    torch: str
    cuda: str
    gpu: str
    seconds: tuple[float, ...]


def examine() -> list[Finding]:
    """Return everything that matters for training on this machine. It starts two ranks and takes seconds."""
    import psutil

    cores, memory = allowed_cores(), psutil.virtual_memory()
    logical = f"{len(cores.logical)} logical allowed of {os.cpu_count() or 1}"
    findings = [
        (
            "machine",
            f"{cpuinfo('model name') or platform.machine()}, {platform.system()} {platform.release()}",
        ),
        ("cores", f"{len(cores.physical)} physical, {logical}; {cores.usable} usable"),
        ("affinity", f"this process may use logical CPUs {listed(cores.logical)}"),
        ("quota", "no limit" if cores.quota is None else f"{cores.quota} cores' worth of time"),
        ("threads", _threads()),
        ("memory", f"{memory.total / 2**30:.1f} GiB, {memory.available / 2**30:.1f} GiB available"),
        (
            "matrix units",
            ", ".join(unit for unit in UNITS if unit in processor_flags()) or "none that matter",
        ),
        ("python", f"{platform.python_version()} ({sys.executable})"),
        ("MPI", library := mpi_library()),
        *(("mpirun", line) for line in mpirun_options(library, cores)),
    ]
    measured = measure_ranks(place_ranks(2))
    if isinstance(measured, str):
        findings += [("torch", _version("torch")), ("2 ranks", f"do not work here: {measured}")]
        return findings
    findings += [
        ("torch", measured.torch),
        ("GPU", measured.gpu or unused_gpu(measured)),
        ("all-reduce", _all_reduce(measured.seconds)),
    ]
    return findings + [("recommended", line) for line in recommend(cores, measured.gpu)]


def measure_ranks(placement: Placement) -> Measured | str:
    """Start two ranks on this host and have them measure; return the reason if that fails."""
    try:
        result = start("tutti.studies.doctor:measure", b"", placement)
    except TuttiError as error:
        return str(error)
    assert isinstance(result, Measured)
    return result


def measure(comm: Communicator, payload: bytes) -> Measured:
    """Return torch's version, the GPU, and the time of an all-reduce (entry point of the ranks)."""
    import statistics

    import torch

    medians = []
    for length in LENGTHS:
        vector, times = torch.ones(length), []
        comm.all_reduce(vector)
        for _ in range(ROUNDS):
            comm.barrier()
            begin = comm.clock()
            comm.all_reduce(vector)
            times.append(comm.clock() - begin)
        medians.append(statistics.median(times))
    gpu = ""
    if torch.cuda.is_available():
        first, count = torch.cuda.get_device_properties(0), torch.cuda.device_count()
        of_them = f", {count} of them: choose one by CUDA_VISIBLE_DEVICES" if count > 1 else ""
        gpu = f"{first.name}, {first.total_memory / 2**30:.0f} GiB{of_them}"
    return Measured(torch.__version__, torch.version.cuda or "", gpu, tuple(medians))


def recommend(cores: Cores, gpu: str) -> list[str]:
    """Return commands to paste on such a machine, each with its reason."""
    count = cores.usable
    lines = []
    if gpu:
        lines.append("tutti train cnn --data mnist -n 1 --device cuda    (one worker on the GPU)")
    lines.append(f"tutti train cnn --data mnist -n {count}    (one rank for each of {count} cores)")
    if {"amx_bf16", "avx512_bf16"} & processor_flags():
        bf16 = f"tutti train cnn --data mnist -n {count} --precision bf16 --layout channels_last"
        lines.append(f"{bf16}    (this processor multiplies bf16 faster; check the accuracy)")
    return lines


def mpirun_options(library: str, cores: Cores) -> list[str]:
    """Return the options that Open MPI's own mpirun refuses to start without, for a user to adapt.

    `library` is as `mpi_library` names it.
    """
    if not library.startswith("Open MPI") or shutil.which("mpirun") is None:
        return []
    root = "--allow-run-as-root " if os.geteuid() == 0 else ""
    return [
        f"mpirun {root}--bind-to none -n {cores.usable} tutti train ...    (more ranks than {cores.usable}: "
        "--oversubscribe, too; 'tutti train' starts its ranks without it)"
    ]


def mpi_library() -> str:
    """Name the MPI that mpi4py would use; asked in another process, as importing MPI initialises it."""
    if _version("mpi4py") == "not installed":
        return "mpi4py is not installed (needed for several machines only): pip install 'tutti[mpi]'"
    environment = dict(os.environ)
    give_home(environment)
    try:
        process = subprocess.run(
            [sys.executable, "-c", MPI_QUESTION],
            env=environment,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"mpi4py is installed, but MPI did not start within {PATIENCE_S} s"
    answer = process.stdout.strip().splitlines()
    if process.returncode != 0 or not answer:
        reason = (process.stderr.strip().splitlines() or ["no reason given"])[-1]
        return f"mpi4py is installed, but no MPI library works: {reason}; try: pip install 'tutti[mpi]'"
    return f"{answer[0]}, mpi4py {_version('mpi4py')}"


def listed(cpus: Sequence[int]) -> str:
    """Return the numbers of CPUs as text."""
    return ", ".join(map(str, cpus)) if len(cpus) <= 16 else f"{cpus[0]} to {cpus[-1]} ({len(cpus)} of them)"


def _threads() -> str:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    given = [f"{name}={os.environ[name]}" for name in names if name in os.environ]
    placement = place_ranks("auto")
    return f"{placement.describe()} by default" + (
        f"; {', '.join(given)} in the environment" if given else ""
    )


def unused_gpu(measured: Measured) -> str:
    """Return what the driver says if torch can use no GPU, and why it cannot."""
    gpu = _driver_gpu()
    if not gpu:
        return "none"
    if not measured.cuda:
        return f"{gpu}, but torch {measured.torch} was built without CUDA"
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return f"{gpu}, but CUDA_VISIBLE_DEVICES='{os.environ['CUDA_VISIBLE_DEVICES']}' hides it"
    return f"{gpu}, but its driver is too old for CUDA {measured.cuda}, which this torch was built with"


def _driver_gpu() -> str:
    """Return the first GPU known to the driver, or nothing."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, "--query-gpu=name", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        return "a GPU whose driver does not answer"
    lines = answer.stdout.strip().splitlines() if answer.returncode == 0 else []
    return lines[0] if lines else ""


def _all_reduce(seconds: tuple[float, ...]) -> str:
    sizes = [(length * 4, took) for length, took in zip(LENGTHS, seconds, strict=True)]
    shown = [f"{_bytes(size)} in {1e3 * took:.3f} ms ({size / took / 1e9:.1f} GB/s)" for size, took in sizes]
    return "2 ranks of this host: " + ", ".join(shown)


def _bytes(size: int) -> str:
    return f"{size / 1e6:.0f} MB" if size >= 1_000_000 else f"{size / 1e3:.0f} KB"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
