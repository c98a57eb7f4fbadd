"""torch.distributed over tutti, over Gloo, and over MPI by hand: 2 ranks on one host.

    python benchmarks/backend.py [--rounds 7] [--launches 5] [--parts collectives,ddp,fsdp,lightning]

"collectives": `all_reduce` of a float32 vector in place, all sides in the same two processes, in turn,
`rounds` times, medians. "MPI_Allreduce" is mpi4py's on the same memory, with no torch in between.

The others: ordinary programs (benchmarks/programs), started by torchrun `launches` times with either backend,
in turn, medians of their samples/s. The name of the backend is all that differs.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from time import perf_counter

RANKS = 2
SIZES = [1 << power for power in range(10, 27, 2)]
"""Bytes: 1 KiB to 64 MiB."""

SIDES = ("tutti", "gloo", "MPI_Allreduce")
TURN_S = 0.1
"""About how long a side is measured at a time."""

BACKENDS = ("tutti", "gloo")
PROGRAMS = {
    "ddp": ("ddp.py", {"mlp, 235 k": 1.9, "mlp, 5.8 M": 1.5, "lenet": 1.05}),
    "fsdp": ("fsdp.py", {"mlp, 5.8 M": 1.0}),
    "lightning": ("with_lightning.py", {"mlp, 235 k": 1.0}),
}
"""By part: the program, and how many times Gloo's speed is wanted, by model."""


def main() -> None:
    from measure import describe_machine

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each side of the collectives")
    parser.add_argument("--launches", type=int, default=5, help="runs of each program with each backend")
    parser.add_argument("--parts", default="collectives,ddp,fsdp,lightning")
    args = parser.parse_args()
    parts = args.parts.split(",")
    print(describe_machine())
    if "collectives" in parts:
        report_collectives(measure_collectives(args.rounds), args.rounds)
    for part in parts:
        if part in PROGRAMS:
            report_program(part, measure_program(PROGRAMS[part][0], args.launches), args.launches)


# --- collectives


def measure_collectives(rounds: int) -> dict[str, dict[int, float]]:
    """Seconds of one call, by side and size: the medians."""
    from tutti.launch.mpirun import find_mpirun, settings
    from tutti.launch.placement import Host

    mpirun = find_mpirun()
    command = [mpirun.path, "-n", str(RANKS)]
    if mpirun.open_mpi:
        command += ["--bind-to", "none", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
    with tempfile.NamedTemporaryFile("r") as found:
        own = settings(mpirun, [Host("localhost", RANKS)], os.environ)
        subprocess.run(
            [*command, sys.executable, "-c", _RANK, found.name, str(rounds)],
            env=os.environ | own | meeting_point(),
            cwd=Path(__file__).parent,
            check=True,
        )
        return {side: {int(n): s for n, s in times.items()} for side, times in json.load(found).items()}


_RANK = "import backend, sys; backend.work(sys.argv[1], int(sys.argv[2]))"


def meeting_point() -> dict[str, str]:
    """Where the ranks meet: a port that is free."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(probe.getsockname()[1]),
            "OMP_NUM_THREADS": "1",
        }


def work(path: str, rounds: int) -> None:
    """On each rank: time every side at every size, in turn; rank 0 writes the medians."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    os.environ |= {"RANK": str(world.Get_rank()), "WORLD_SIZE": str(world.Get_size())}
    import torch
    import torch.distributed as dist

    import tutti  # noqa: F401

    dist.init_process_group("gloo")
    groups = {backend: dist.new_group(backend=backend) for backend in BACKENDS}
    torch.set_num_threads(1)
    found: dict[str, dict[int, float]] = {side: {} for side in SIDES}
    for size in SIZES:
        vector = torch.zeros(size // 4)
        calls: dict[str, Callable[[], object]] = {
            side: partial(dist.all_reduce, vector, group=group) for side, group in groups.items()
        }
        calls["MPI_Allreduce"] = partial(world.Allreduce, MPI.IN_PLACE, vector.numpy())
        counts = {side: world.bcast(_count(call)) for side, call in calls.items()}
        times: dict[str, list[float]] = {side: [] for side in SIDES}
        for turn in range(rounds):
            for place in range(len(SIDES)):
                side = SIDES[(turn + place) % len(SIDES)]
                times[side].append(_time(calls[side], counts[side], world.Barrier))
        for side in SIDES:
            found[side][size] = median(times[side])
    if world.Get_rank() == 0:
        Path(path).write_text(json.dumps(found))
    dist.destroy_process_group()


def _count(call: Callable[[], object]) -> int:
    """How many calls take about as long as a turn."""
    for _ in range(3):
        call()
    began = perf_counter()
    for _ in range(5):
        call()
    return max(3, min(5000, int(TURN_S * 5 / (perf_counter() - began))))


def _time(call: Callable[[], object], count: int, barrier: Callable[[], object]) -> float:
    """Seconds of one call."""
    call()
    barrier()
    began = perf_counter()
    for _ in range(count):
        call()
    return (perf_counter() - began) / count


def report_collectives(times: dict[str, dict[int, float]], rounds: int) -> None:
    from measure import table

    print(f"\nall_reduce of a float32 vector, microseconds, {RANKS} ranks, median of {rounds}\n")
    rows, ratios = [], {"gloo": [], "MPI_Allreduce": []}
    for size in SIZES:
        ours = times["tutti"][size]
        for side, found in ratios.items():
            found.append(times[side][size] / ours)
        figures = [f"{1e6 * times[side][size]:,.1f}" for side in SIDES]
        wanted = [verdict(ratios["gloo"][-1], 20 if size <= 64 << 10 else 0)]
        wanted += [verdict(ratios["MPI_Allreduce"][-1], 1.5 if 64 << 10 <= size <= 4 << 20 else 1.0)]
        rows.append([_bytes(size), *figures, *wanted])
    print(table(["bytes", *SIDES, "gloo / tutti", "MPI_Allreduce / tutti"], rows))
    mean = prod(ratios["gloo"]) ** (1 / len(SIZES))
    print(f"\nGeometric mean of gloo / tutti: {verdict(mean, 4)}")


def verdict(ratio: float, wanted: float) -> str:
    """The ratio, and whether it is as large as wanted (0: whatever it is)."""
    if not wanted:
        return f"{ratio:.2f}"
    return f"{ratio:.2f} ({wanted:g} {'reached' if ratio >= wanted else 'MISSED'})"


def _bytes(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


# --- programs


def measure_program(program: str, launches: int) -> dict[str, dict[str, list[float]]]:
    """Samples/s by backend and model, in the order of the launches."""
    found: dict[str, dict[str, list[float]]] = {backend: {} for backend in BACKENDS}
    for launch in range(launches):
        for backend in BACKENDS if launch % 2 else reversed(BACKENDS):
            for model, rate in _launch(program, backend).items():
                found[backend].setdefault(model, []).append(rate)
    return found


def _launch(program: str, backend: str) -> dict[str, float]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    command += [str(Path(__file__).parent / "programs" / program), backend]
    done = subprocess.run(
        command,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{program} {backend} failed:\n{done.stderr}")
    rates: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return rates


def report_program(part: str, found: dict[str, dict[str, list[float]]], launches: int) -> None:
    from measure import table

    program, wanted = PROGRAMS[part]
    print(f"\nprograms/{program}, samples/s, {RANKS} ranks, median of {launches} launches\n")
    rows = []
    for model, least in wanted.items():
        ours, theirs = (median(found[backend][model]) for backend in BACKENDS)
        rows.append([model, f"{theirs:,.0f}", f"{ours:,.0f}", verdict(ours / theirs, least)])
    print(table(["model", "gloo", "tutti", "tutti / gloo"], rows))


if __name__ == "__main__":
    main()
