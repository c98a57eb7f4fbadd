"""The launcher of this process: tutti's supervisor, an MPI launcher, or none."""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from tutti.errors import UserError
from tutti.launch.allocation import expand_counts
from tutti.load_object import require_packages

_SPECIAL_STEPS = 0xFFFFFFF0
"""Slurm numbers the steps that are no `srun` (batch script, interactive shell, extern) from here upwards."""


class Launcher(enum.Enum):
    """The kinds of launchers."""

    ALONE = "python"
    TUTTI = "tutti"
    MPIRUN = "mpirun"
    SRUN = "srun"
    TORCHRUN = "torchrun"


@dataclass(frozen=True)
class LaunchContext:
    """The launcher of this process, and its place in the job as far as the launcher gives it."""

    launcher: Launcher
    rank: int
    size: int
    local_rank: int | None = None  # on its host
    local_size: int | None = None  # the number of the job's processes on this host

    @property
    def mpi(self) -> bool:
        """True if this process is a rank of an MPI job."""
        return self.launcher in (Launcher.MPIRUN, Launcher.SRUN)

    @property
    def given(self) -> bool:
        """True if this process is one of several ranks that the user's own launcher has started."""
        return self.mpi or self.launcher is Launcher.TORCHRUN


ALONE = LaunchContext(Launcher.ALONE, rank=0, size=1, local_rank=0, local_size=1)

_ours: LaunchContext | None = None


def become_rank(rank: int, size: int) -> None:
    """Note that this process is a rank of tutti's own supervisor."""
    # Not in the environment, which its children would inherit although they are no ranks.
    global _ours
    _ours = LaunchContext(Launcher.TUTTI, rank=rank, size=size, local_rank=rank, local_size=size)


def started_by(environ: Mapping[str, str] | None = None) -> LaunchContext:
    """Find the launcher of this process; UserError if tutti cannot work under it, or mpi4py is missing."""
    if environ is None:
        if _ours is not None:
            return _ours
        environ = os.environ
    place = mpi_place(environ)
    if place is not None:
        started = f"{place.launcher.value} started this process as one of several ranks, which needs"
        require_packages(started, ["mpi4py"], "mpi")
        return place
    return _torchrun(environ) or ALONE


def mpi_place(environ: Mapping[str, str]) -> LaunchContext | None:
    """Return this process's place in an MPI job; None outside one. UserError: its size is unknown."""
    return _open_mpi(environ) or _slurm(environ) or _pmi(environ)


def ends_with_a_rank(environ: Mapping[str, str]) -> bool:
    """Return whether the launcher ends the whole job as soon as a rank exits with a code other than 0.

    torchrun does, and so does Open MPI's, except with `--with-ft ulfm`.
    """
    if mpi_place(environ) is None and _torchrun(environ) is not None:
        return True
    tolerant = environ.get("OMPI_MCA_mpi_ft_enable", "0") not in ("0", "false")
    return "OMPI_COMM_WORLD_SIZE" in environ and not tolerant


def _torchrun(environ: Mapping[str, str]) -> LaunchContext | None:
    place = _read(environ, Launcher.TORCHRUN, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return place if "TORCHELASTIC_RUN_ID" in environ and place.size > 1 else None


def _open_mpi(environ: Mapping[str, str]) -> LaunchContext | None:
    if "OMPI_COMM_WORLD_SIZE" not in environ:
        return None
    names = (f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE"))
    return _read(environ, Launcher.MPIRUN, *names)


def _slurm(environ: Mapping[str, str]) -> LaunchContext | None:
    """Return the place of a task of an `srun` of several tasks."""
    size = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in environ else "SLURM_NTASKS"
    place = _read(environ, Launcher.SRUN, "SLURM_PROCID", size, "SLURM_LOCALID", "")
    if place.size <= 1 or not is_task(environ):
        return None
    return replace(place, local_size=_slurm_tasks_here(environ))


def is_task(environ: Mapping[str, str]) -> bool:
    """Return whether this process is a task of `srun`, and not a shell in an allocation or a batch script."""
    step = _number(environ, "SLURM_STEP_ID", _SPECIAL_STEPS)
    # The tasks that a shell of `srun --pty` starts by srun have its SLURM_PTY_PORT, but not its terminal.
    typed = "SLURM_PTY_PORT" in environ and os.isatty(0)
    return "SLURM_PROCID" in environ and step < _SPECIAL_STEPS and not typed


def _slurm_tasks_here(environ: Mapping[str, str]) -> int | None:
    """Return the entry of this node in Slurm's list of tasks per node, such as "4(x2),3"."""
    listed = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE", "")
    counts = expand_counts(listed)
    node = _number(environ, "SLURM_NODEID", 0)
    return counts[node] if 0 <= node < len(counts) else None


def _pmi(environ: Mapping[str, str]) -> LaunchContext | None:
    """Return the place of a rank of MPICH, Intel MPI or another PMI or PMIx launcher, outside Slurm."""
    if "SLURM_STEP_ID" in environ or not ("PMI_SIZE" in environ or "PMIX_RANK" in environ):
        return None
    if _known(environ, "PMI_SIZE") is None:
        raise UserError(
            f"a launcher started this process as rank {environ.get('PMIX_RANK')}, but does not tell how many "
            "there are (PMI_SIZE is not set); start the ranks with mpirun or srun"
        )
    rank = "PMI_RANK" if "PMI_RANK" in environ else "PMIX_RANK"
    return _read(environ, Launcher.MPIRUN, rank, "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")


def _read(
    environ: Mapping[str, str], launcher: Launcher, rank: str, size: str, local_rank: str, local_size: str
) -> LaunchContext:
    """Read a place from the variables of these names."""
    place = _number(environ, rank, 0), _number(environ, size, 1)
    return LaunchContext(launcher, *place, _known(environ, local_rank), _known(environ, local_size))


def _known(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name, "")
    return int(text) if text.isdecimal() else None


def _number(environ: Mapping[str, str], name: str, otherwise: int) -> int:
    value = _known(environ, name)
    return otherwise if value is None else value
