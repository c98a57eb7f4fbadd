"""An inventory of this machine, and commands to run on it. Needs no torch: a rank reports its version."""

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
"""Features of processors for matrices and vectors, by their names in /proc/cpuinfo."""

PATIENCE_S = 60
"""Seconds to wait for the answer of MPI or the GPU driver."""

NO_VERSION = "not installed"

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
    """The measurements of two ranks."""

    torch: str  # its version
    cuda: str  # the version of CUDA that torch was built with; "": none
    gpu: str  # that torch can use; "": none
    seconds: tuple[float, ...]  # the median time of an all-reduce, for each of `LENGTHS`


def examine() -> list[Finding]:
    """Return the findings about this machine. It starts two ranks, which takes seconds."""
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
        return [*findings, ("torch", version_of("torch")), ("2 ranks", f"do not work here: {measured}")]
    return [
        *findings,
        ("torch", measured.torch),
        ("GPU", measured.gpu or unused_gpu(measured)),
        ("all-reduce", _all_reduce(measured.seconds)),
        *(("recommended", line) for line in recommend(cores, measured.gpu)),
    ]


def measure_ranks(placement: Placement) -> Measured | str:
    """Return what two ranks of this host measure, or why they cannot."""
    try:
        result = start("tutti.studies.doctor:measure", b"", placement)
    except TuttiError as error:
        return str(error)
    assert isinstance(result, Measured)
    return result


def measure(comm: Communicator, payload: bytes) -> Measured:
    """Measure on a rank (entry point)."""
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
        of_them = f", one of {count}: choose by CUDA_VISIBLE_DEVICES" if count > 1 else ""
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
    """Return a command for Open MPI's mpirun with the options that it demands; `library` names the MPI."""
    if not library.startswith("Open MPI") or shutil.which("mpirun") is None:
        return []
    root = "--allow-run-as-root " if os.geteuid() == 0 else ""
    return [
        f"mpirun {root}--bind-to none -n {cores.usable} tutti train ...    (add --oversubscribe for more "
        f"ranks than {cores.usable}; 'tutti train' needs no mpirun)"
    ]


def mpi_library() -> str:
    """Name the MPI library that mpi4py uses. Another process imports it, as that initialises MPI."""
    if version_of("mpi4py") == NO_VERSION:
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
        return (
            f"mpi4py is installed, but no MPI library works: {last_line(process.stderr)}; try: pip install "
            "'tutti[mpi]'"
        )
    return f"{answer[0]}, mpi4py {version_of('mpi4py')}"


def last_line(errors: str) -> str:
    """Return the last line that a program wrote to stderr."""
    return (errors.strip().splitlines() or ["no reason given"])[-1]


def listed(cpus: Sequence[int]) -> str:
    """Return the numbers of CPUs as text."""
    return ", ".join(map(str, cpus)) if len(cpus) <= 16 else f"{len(cpus)} from {cpus[0]} to {cpus[-1]}"


def _threads() -> str:
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
    given = [f"{name}={os.environ[name]} in the environment" for name in names if name in os.environ]
    return "; ".join([f"{place_ranks('auto').describe()} by default", *given])


def unused_gpu(measured: Measured) -> str:
    """Return the GPU that the driver knows and torch cannot use, with the reason."""
    gpu = _driver_gpu()
    if not gpu:
        return "none"
    if not measured.cuda:
        return f"{gpu}, but torch {measured.torch} was built without CUDA"
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        return f"{gpu}, but CUDA_VISIBLE_DEVICES='{os.environ['CUDA_VISIBLE_DEVICES']}' hides it"
    return f"{gpu}, but its driver is too old for CUDA {measured.cuda}, which this torch was built with"


def _driver_gpu() -> str:
    """Return the first GPU known to the driver; "": none."""
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


def version_of(package: str) -> str:
    """Return the version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return NO_VERSION
