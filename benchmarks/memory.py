"""What the ranks of one host share: the proportional set size of 1, 2 and 4 ranks in training.

    python benchmarks/memory.py [--data mnist] [--model cnn]

Data and weights are held once per host, whatever the number of ranks; gradients once per rank. A page that k
ranks share counts 1/k for each of them, so the sum over the ranks is what the job really takes. The column
"beside torch" takes away what the same number of processes need that have only imported torch.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time

import psutil

from measure import describe_machine, table

IDLE = "import torch, sys; torch.ones(1) @ torch.ones(1); print('up', flush=True); sys.stdin.read()"


def of_training(model: str, data: str, ranks: int) -> list[int]:
    """Bytes (PSS) of each rank, the largest sum seen while training."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tutti.cli.main", "train", model, "--data", data, "-n", str(ranks)]
        command += ["--steps", "200", "--out", f"{folder}/run"]
        job = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        most: list[int] = []
        while job.poll() is None:
            most = max(most, _sizes(job.pid, ranks), key=sum)
            time.sleep(0.1)
        if job.returncode:
            raise SystemExit(f"training ended with {job.returncode}")
        return most


def of_idle(processes: int) -> int:
    """Bytes (PSS) of so many processes that have imported torch."""
    started = [
        subprocess.Popen([sys.executable, "-c", IDLE], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        for _ in range(processes)
    ]
    for process in started:
        process.stdout.readline()
    total = sum(psutil.Process(process.pid).memory_full_info().pss for process in started)
    for process in started:
        process.communicate()
    return total


def _sizes(pid: int, ranks: int) -> list[int]:
    try:
        processes = psutil.Process(pid).children(recursive=True) if ranks > 1 else [psutil.Process(pid)]
        return [process.memory_full_info().pss for process in processes]
    except psutil.Error:
        return []


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--model", default="cnn")
    args = parser.parse_args()
    rows = []
    for ranks in (1, 2, 4):
        sizes, idle = of_training(args.model, args.data, ranks), of_idle(ranks)
        each = ", ".join(f"{size / 2**20:.0f}" for size in sizes)
        rows.append([ranks, each, f"{sum(sizes) / 2**20:.0f}", f"{(sum(sizes) - idle) / 2**20:.0f}"])
    print(describe_machine())
    print(f"proportional set size in MiB, {args.model} on {args.data}\n")
    print(table(["ranks", "each", "all ranks", "beside torch"], rows))


if __name__ == "__main__":
    main()
