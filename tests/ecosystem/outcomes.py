"""Runs the same checks with several backends in one job, and hands their outcomes to the tests.

A check is a function of no arguments, what a program does between `init_process_group` and
`destroy_process_group`; it returns what must be the same whatever the backend. One job runs all of them, as
each rank spends seconds on importing torch.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

RANKS = 2
BACKENDS = ("gloo", "tutti")
PATIENCE = timedelta(seconds=60)

PORTS = "TUTTI_TEST_PORTS"
"""The environment variable with the ports where the groups of a job meet, one after the other.

Without it all meet at `MASTER_PORT`, in the store of a launcher, which outlives them."""

DEVICE = "TUTTI_TEST_DEVICE"
"""The environment variable that says where the programs compute: cpu, cuda (each rank's own), cuda:0, ...

Without it they compute on the CPU."""

Check = Callable[[], dict[str, Tensor]]
Outcome = dict[str, Tensor] | str
"""What a check returned, or the traceback of what it raised."""


def main(program: Mapping[str, Any]) -> None:
    """What a program of this folder does: PROGRAM FOLDER BACKEND+BACKEND... CHECK,CHECK...

    Args:
        program: the checks by name.
    """
    folder, backends, checks = sys.argv[1:]
    device = os.environ.get(DEVICE, "cpu")
    # Devices and backends may differ by the order of additions alone.
    torch.set_default_dtype(torch.float64)
    if device != "cpu":
        chosen = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device == "cuda" else device
        torch.cuda.set_device(chosen)
        torch.set_default_device(chosen)
    ports = iter(filter(None, os.environ.get(PORTS, "").split(",")))
    for backend in backends.split("+"):
        os.environ["MASTER_PORT"] = next(ports, os.environ["MASTER_PORT"])
        record({name: program[name] for name in checks.split(",")}, backend, Path(folder))


def record(checks: Mapping[str, Check], backend: str, folder: Path) -> None:
    """Run the checks, one after the other, with this backend; leave this rank's outcomes in `folder`."""
    dist.init_process_group(backend, timeout=PATIENCE)
    outcomes: dict[str, Outcome] = {}
    for name, check in checks.items():
        torch.manual_seed(0)
        try:
            outcomes[name] = check()
        except Exception:
            outcomes[name] = traceback.format_exc()
    torch.save(outcomes, folder / file_of(backend, dist.get_rank()))
    dist.destroy_process_group()


def file_of(backend: str, rank: int) -> str:
    """Where the outcomes of a rank are, in the folder."""
    return f"{backend}-{rank}.pt"


def assert_same_on_every_rank(
    folder: Path,
    check: str,
    backends: Sequence[str] = BACKENDS,
    ranks: int = RANKS,
    tolerance: float = 1e-12,
) -> None:
    """Fail unless every rank's outcome of the check is the same with both backends."""
    for rank in range(ranks):
        expected, found = (_outcome(folder, backend, rank, check) for backend in backends)
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance / 10)


def _outcome(folder: Path, backend: str, rank: int, check: str) -> dict[str, Tensor]:
    found: Outcome = torch.load(folder / file_of(backend, rank), map_location="cpu")[check]
    if isinstance(found, str):
        pytest.fail(f"with {backend}, rank {rank} raised\n{found}")
    return found
