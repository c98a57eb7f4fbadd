"""`tutti train MODEL --data D --plan auto` against the plain PyTorch script that a careful user writes.

    python benchmarks/headline.py [--tasks lenet,cnn] [--repeats 1]

Both sides train the same model on the same samples with the same batch size, optimizer and one-cycle
schedule, evaluate the test part after each epoch, and end when it is classified well enough. "whole" is the
time of the process, from its start to its end, with all that tutti measures before it trains (`--plan
fresh`); "again" is a second run, for which it remembers what it has found (`--plan auto`), unless other
programs used the cores; "training" is from the first update on, evaluation included. A repeat takes about a
minute for lenet and three for cnn, on two idle cores.

The script (programs/careful_training.py) runs on all threads in fp32. Its DataLoader feeds single samples in
the process or in two workers, or whole batches: each is tried before, and the fastest is taken. The sides
take turns.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter

PROGRAM = Path(__file__).parent / "programs" / "careful_training.py"
FEEDINGS = ("in-process", "workers", "whole-batches")


@dataclass(frozen=True)
class Task:
    """What both sides train: model, data, the accuracy to reach, and the speed-ups wanted."""

    model: str
    data: str
    target: float
    wanted: tuple[float, float]  # of the first run, and again
    epochs: int
    batch_size: int
    lr: float
    optimizer: str = "adam"
    augmented: bool = False
    tried: int = 30
    """Updates of the trial of each way to feed the script."""

    budget_s: float = 20.0
    """Seconds that tutti may measure before it trains."""


TASKS = {
    "lenet": Task("lenet", "mnist", 0.99, (1.5, 1.6), epochs=6, batch_size=64, lr=0.005, tried=100),
    "cnn": Task("cnn", "fashion-mnist", 0.92, (1.8, 1.9), epochs=10, batch_size=64, lr=0.003),
    "resnet18": Task(
        "resnet18", "cifar10", 0.85, (2.5, 2.5), 20, 128, 0.1, "sgd", True, tried=3, budget_s=60.0
    ),
}


WANTED_WITH_AMX = 2.5
"""The speed-up wanted where the processor multiplies matrices of bf16, which tutti may choose."""


@dataclass(frozen=True)
class Run:
    """One run of a side: its seconds, its samples per second, the last accuracy (None: not looked at)."""

    whole_s: float
    training_s: float
    rate: float
    accuracy: float | None


def main() -> None:
    from measure import describe_machine, table

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", default="lenet,cnn", help="of: " + ", ".join(TASKS))
    parser.add_argument("--repeats", type=int, default=1, help="runs of a side to the accuracy (1)")
    parser.add_argument(
        "--epochs", type=int, help="of each run, for a trial that need not reach the accuracy"
    )
    args = parser.parse_args()
    print(describe_machine(), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        rows = [times(name, args.repeats, args.epochs, Path(folder)) for name in args.tasks.split(",")]
    print("\ntime to the accuracy, in seconds, medians\n")
    heads = ["task", "accuracy", "tutti", "again", "script", "whole", "whole, again", "wanted"]
    print(table([*heads, "tutti training", "script training", "training", "accuracy reached"], rows))


def times(name: str, repeats: int, epochs: int | None, folder: Path) -> list[str]:
    """Train to the accuracy on both sides, in turn."""
    from tutti.launch.cores import processor_flags

    task, file = TASKS[name], arrays(TASKS[name].data, folder)
    task = task if epochs is None else replace(task, epochs=epochs)
    feeding = best_feeding(task, file)
    sides: dict[str, list[Run]] = {"tutti": [], "again": [], "script": []}
    for turn in range(repeats):
        sides["tutti"].append(run_tutti(task, file, folder / f"{name}-{turn}", "fresh"))
        sides["again"].append(run_tutti(task, file, folder / f"{name}-{turn}-again", "auto"))
        sides["script"].append(run_script(task, file, feeding))
        show(name, {side: runs[-1] for side, runs in sides.items()})
    tutti, again, script = (both_medians(runs) for runs in sides.values())
    wanted = (WANTED_WITH_AMX,) * 2 if "amx_bf16" in processor_flags() else task.wanted
    reached = all((run.accuracy or 0) >= task.target for runs in sides.values() for run in runs)
    return [
        name,
        f"{task.target:.0%}",
        f"{tutti[0]:.1f}",
        f"{again[0]:.1f}",
        f"{script[0]:.1f}",
        f"{script[0] / tutti[0]:.2f}",
        f"{script[0] / again[0]:.2f}",
        f"{wanted[0]}, {wanted[1]}",
        f"{tutti[1]:.1f}",
        f"{script[1]:.1f}",
        f"{script[1] / tutti[1]:.2f}",
        "by all" if reached else "NOT BY ALL",
    ]


def arrays(data: str, folder: Path) -> Path:
    """Write a data set as arrays for both sides: its test part as what is evaluated after each epoch."""
    import numpy as np

    from tutti.comm.virtual.world import VirtualWorld
    from tutti.data import open_data

    file = folder / f"{data}.npz"
    if not file.exists():
        (found,) = VirtualWorld(ranks=1).run(lambda comm: open_data(data, comm, 0.0, 0))
        parts = {"train": found.train, "val": found.test}
        values = {f"x_{name}": part.inputs.numpy() for name, part in parts.items()}
        values |= {f"y_{name}": part.targets.numpy() for name, part in parts.items()}
        np.savez(file, **values)
    return file


def run_tutti(task: Task, file: Path, out: Path, plan: str) -> Run:
    """Train by the command line, with a plan: fresh, or auto."""
    command = [sys.executable, "-m", "tutti", "train", task.model, "--data", str(file), "--plan", plan]
    command += ["--budget", str(task.budget_s), "--optimizer", task.optimizer, "--schedule", "one_cycle"]
    command += ["--batch-size", str(task.batch_size), "--lr", str(task.lr), "--out", str(out)]
    command += ["--optimizer.momentum", "0.9"] if task.optimizer == "sgd" else []
    command += ["--augment", "crop,flip"] if task.augmented else []
    command += ["--epochs", str(task.epochs), "--monitor", "val_accuracy", "--goal", str(task.target)]
    began = perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    whole_s = perf_counter() - began
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    lines = [*done.stdout.splitlines(), *done.stderr.splitlines()]
    print(*(line for line in lines if line.startswith(("plan: ", "tutti: warning"))), sep="\n", flush=True)
    history = [json.loads(line) for line in (out / "history.jsonl").read_text().splitlines()]
    samples = sum(one["train"]["samples"] for one in history)
    trained_s = sum(one["train"]["samples"] / one["samples_per_s"] for one in history)
    total_s = sum(one["seconds"]["total"] for one in history)
    return Run(whole_s, total_s, samples / trained_s, history[-1]["validation"]["metrics"]["accuracy"])


def run_script(task: Task, file: Path, feeding: str, updates: int | None = None) -> Run:
    """Train by the plain script."""
    command = [sys.executable, str(PROGRAM), str(file), "--model", task.model, "--feeding", feeding]
    command += ["--batch-size", str(task.batch_size), "--epochs", str(task.epochs), "--lr", str(task.lr)]
    command += ["--optimizer", task.optimizer, "--target", str(task.target)]
    command += ["--flip-and-crop"] if task.augmented else []
    command += [] if updates is None else ["--updates", str(updates)]
    began = perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=as_by_default())
    whole_s = perf_counter() - began
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    found = json.loads(done.stdout.splitlines()[-1])
    accuracy = found["accuracies"][-1] if found["accuracies"] else None
    return Run(whole_s, found["seconds"], found["samples_per_s"], accuracy)


def as_by_default() -> dict[str, str]:
    """The environment without a number of threads: torch takes all cores then."""
    return {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}


def best_feeding(task: Task, file: Path) -> str:
    """The fastest way to feed the script, of a short trial of each."""
    rates = {feeding: run_script(task, file, feeding, task.tried).rate for feeding in FEEDINGS}
    best = max(rates, key=rates.__getitem__)
    tried = ", ".join(f"{feeding} {rate:,.0f}" for feeding, rate in rates.items())
    print(f"{task.model}: the script's DataLoader, samples/s: {tried}; {best} is taken", flush=True)
    return best


def both_medians(runs: list[Run]) -> tuple[float, float]:
    """The median seconds of the whole process, and of the training."""
    return median(run.whole_s for run in runs), median(run.training_s for run in runs)


def show(name: str, runs: dict[str, Run]) -> None:
    for side, run in runs.items():
        accuracy = "" if run.accuracy is None else f", accuracy {run.accuracy:.2%}"
        print(f"{name}, {side}: {run.rate:,.0f} samples/s, {run.whole_s:.1f} s whole{accuracy}", flush=True)


if __name__ == "__main__":
    main()
