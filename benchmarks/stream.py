"""Training from files that memory does not hold: samples per second, and the memory that it takes.

    python benchmarks/stream.py [--quick] [--folder F] [--gigabytes 4] [--models lenet,cnn] ...

All sides train the same model with batches of 128 on two cores:

    tutti, streaming       from the files in F, which are written there if it is not there yet
    tutti, from memory     the same program; as many samples as memory should hold, in one file
    DataLoader             a plain program on all threads; 2 workers, memory-mapped NPY files, shuffle=True

Before each measurement the files are dropped from the cache of the operating system. Memory is what the
processes hold themselves (anonymous and shared memory, PSS). Starting does not count: the speed is from
the first batch on, of tutti from the first update, waiting for its first window included.

With --quick the whole table takes less than four minutes on two idle cores: of 2 GB, and two fifths of the
updates.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import psutil

from measure import describe_machine, table

BATCH = 128
SMALL = 100_000
"""Samples that are trained on from memory."""

STEPS = {"lenet": 1400, "cnn": 300}
"""About ten seconds each on two cores."""

QUICK = 0.4
"""The share of them with --quick."""

GIGABYTES, QUICK_GIGABYTES = 4.0, 2.0
"""Of files that are written, without and with --quick."""

SHARD = (1 << 30) // 784
PROGRAM = Path(__file__).parent / "programs" / "stream_by_loader.py"


@dataclass(frozen=True)
class Measured:
    """A training.

    Attributes:
        rate: samples per second.
        own: the most bytes that its processes held themselves.
    """

    rate: float
    own: int


def write_shards(folder: Path, samples: int, each: int = SHARD) -> None:
    """Write pictures of ten classes, each a pattern and noise, in files of up to 1 GiB."""
    random = np.random.default_rng(0)
    patterns = random.integers(0, 120, (10, 784), dtype=np.uint8)
    folder.mkdir(parents=True)
    count = -(-samples // each)
    for number in range(count):
        name, size = f"{number:05}-of-{count:05}", min(each, samples - number * each)
        targets = random.integers(0, 10, size, dtype=np.uint8)
        inputs = np.lib.format.open_memmap(folder / f"x_train-{name}.npy", "w+", np.uint8, (size, 28, 28))
        for start in range(0, size, SMALL):
            some = targets[start : start + SMALL]
            noise = np.frombuffer(random.bytes(len(some) * 784), np.uint8).reshape(-1, 784) >> 1
            inputs[start : start + len(some)] = (noise + patterns[some]).reshape(-1, 28, 28)
        inputs.flush()
        np.save(folder / f"y_train-{name}.npy", targets)


def write_small(large: Path, folder: Path) -> None:
    """Write the first samples as one pair of NPY files."""
    folder.mkdir(parents=True)
    first = sorted(large.glob("x_train*.npy"))[0], sorted(large.glob("y_train*.npy"))[0]
    inputs, targets = (np.load(path, mmap_mode="r")[:SMALL] for path in first)
    np.save(folder / "x_train.npy", inputs)
    np.save(folder / "y_train.npy", targets)


def drop(folder: Path) -> None:
    """Drop all files of a folder from the cache of the operating system."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def own_bytes(process: psutil.Process) -> int:
    """Return the anonymous and shared memory of a process and its children; shared pages count once."""
    found = 0
    for one in [process, *process.children(recursive=True)]:
        try:
            lines = Path(f"/proc/{one.pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        sizes = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.endswith("kB")}
        found += 1024 * (sizes.get("Pss_Anon", 0) + sizes.get("Pss_Shmem", 0))
    return found


def watched(command: list[str], data: Path) -> tuple[str, int]:
    """Run a command; returns what it prints, and the most memory that its processes hold themselves."""
    drop(data)
    most = 0
    with tempfile.TemporaryFile("w+") as said:
        job = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT)
        process = psutil.Process(job.pid)
        while job.poll() is None:
            most = max(most, own_bytes(process))
            time.sleep(0.5)
        said.seek(0)
        text = said.read()
    if job.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {job.returncode}:\n{text}")
    return text, most


def by_tutti(model: str, folder: Path, steps: int, *options: str) -> Measured:
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, "-m", "tutti", "train", model, "--data", str(folder), "-n", "2"]
        command += ["--batch-size", str(BATCH), "--steps", str(steps), "--validation", "0"]
        command += ["--out", f"{place}/run", *options]
        text, own = watched(command, folder)
        records = [json.loads(line) for line in Path(place, "run/history.jsonl").read_text().splitlines()]
    if "streaming" in text:
        print(
            *(line for line in text.splitlines() if line.startswith(("streaming", "shuffle", "of the time"))),
            sep="\n",
        )
    seen = sum(record["train"]["samples"] for record in records)
    seconds = sum(record["train"]["samples"] / record["samples_per_s"] for record in records)
    return Measured(seen / seconds, own)


def by_loader(model: str, folder: Path, steps: int) -> Measured:
    command = [sys.executable, str(PROGRAM), model, str(folder), str(BATCH), str(steps), "2"]
    text, own = watched(command, folder)
    return Measured(float(text.split()[-1]), own)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument(
        "--quick", action="store_true", help="fewer updates, and fewer files if they are made"
    )
    arguments.add_argument("--folder", type=Path, help="with the files; by default a temporary one")
    arguments.add_argument(
        "--gigabytes", type=float, help="of files, if they are to be written (4; with --quick 2)"
    )
    arguments.add_argument("--models", default="lenet,cnn", help="to train (lenet,cnn)")
    arguments.add_argument("--rounds", type=int, default=1, help="measurements of each side (1)")
    arguments.add_argument("--buffer", default="128", help="MB, of tutti's streaming (128)")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory() as place:
        large = options.folder or Path(place, "large")
        if not large.exists():
            gigabytes = options.gigabytes or (QUICK_GIGABYTES if options.quick else GIGABYTES)
            write_shards(large, int(gigabytes * 1e9 / 784))
        small = Path(place, "small")
        write_small(large, small)
        measure(large, small, options)


def measure(large: Path, small: Path, options: argparse.Namespace) -> None:
    print(describe_machine())
    size = sum(path.stat().st_size for path in large.glob("x_train*.npy"))
    print(f"{size / 1e9:.1f} GB in {len(list(large.glob('x_train*.npy')))} files; batch {BATCH}, 2 cores\n")
    rows = []
    for model in options.models.split(","):
        steps = int(STEPS[model] * (QUICK if options.quick else 1))
        streaming = partial(
            by_tutti, model, large, steps, "--data.stream", "true", "--data.buffer", options.buffer
        )
        sides: dict[str, Callable[[], Measured]] = {
            "tutti, streaming": streaming,
            "tutti, from memory": partial(by_tutti, model, small, steps, "--data.stream", "false"),
            "DataLoader": partial(by_loader, model, large, steps // 10),
        }
        found: dict[str, list[Measured]] = {name: [] for name in sides}
        for _ in range(options.rounds):
            for name, side in sides.items():
                found[name].append(side())
                print(f"{model}: {name}: {found[name][-1].rate:,.0f} samples/s", flush=True)
        stream = median(one.rate for one in found["tutti, streaming"])
        for name, measured in found.items():
            rate = median(one.rate for one in measured)
            own = max(one.own for one in measured) / 1e6
            rows.append([model, name, f"{rate:,.0f}", f"{stream / rate:.2f}x", f"{own:,.0f}"])
    heads = ["model", "side", "samples/s", "streaming / side", "processes, MB"]
    print()
    print(table(heads, rows))


if __name__ == "__main__":
    main()
