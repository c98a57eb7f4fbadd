"""Many trainings at once on a farm, beside one after the other and beside joblib.

    python benchmarks/farm.py [PART ...] [--quick] [--rounds 3] [--data mnist]

Parts, both by default:

    folds      lenet and mlp x 3 schedules x 5 folds of 6,000 samples
    short      8 folds that last under a second each

Sides are measured in turn; figures are medians. A ratio is that of two sides in the same round: the median,
with the least and the greatest in brackets. "command" is the time of the whole command, with the import of
torch; "jobs" is the time from the beginning of the first job to the end of the last. The others train by the
same loop, with the same models, schedules, samples in memory, batches and epochs: programs/folds*.py. pip
install 'tutti[bench]' brings joblib.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median

import numpy as np

PROGRAMS = Path(__file__).parent / "programs"
QUICK = "--rounds 1 --folds 2 --samples 600 --epochs 1"
FARM, ALONE = "tutti cv", "one process, 1 thread"
JOBS = {"folds": (("lenet", "mlp"), ("warm", "cosine", "plateau")), "short": (("mlp",), ("none",))}
"""By part: models and schedules."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(JOBS))
    parser.add_argument("--quick", action="store_true", help=f"small: {QUICK}")
    parser.add_argument("--data", default="mnist", choices=("mnist", "noise"), help="noise needs no files")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each side")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="for jobs at a time")
    parser.add_argument("--samples", type=int, default=6_000)
    parser.add_argument("--folds", type=int, default=5, help="of folds")
    parser.add_argument("--epochs", type=int, default=1, help="of folds")
    parser.add_argument("--batch-size", type=int, default=32)
    quick = "--quick" in sys.argv[1:]
    args = parser.parse_args([*QUICK.split(), *sys.argv[1:]] if quick else None)
    from measure import describe_machine, table

    print(describe_machine(), flush=True)
    for part in args.parts or JOBS:
        models, schedules = JOBS[part]
        folds, epochs = (args.folds, args.epochs) if part == "folds" else (8, 2)
        with tempfile.TemporaryDirectory(prefix="tutti-farm-") as folder:
            sides = sides_of(args, Path(folder), models, schedules, folds, epochs)
            measure_in_turn(sides, args.rounds)
        jobs = len(models) * len(schedules) * folds
        about = f"{jobs} jobs of {epochs} epochs, {args.samples:,} samples; median of {args.rounds}"
        print(f"\n{part}: {about}\n")
        heads = ["side", "command s", "jobs s", "a job s", "command / farm's", "jobs / farm's", "accuracy %"]
        print(table(heads, [row(name, side, sides[FARM]) for name, side in sides.items()]), flush=True)


@dataclass
class Side:
    """One way to do all jobs.

    Attributes:
        command: what is started.
        farm: the folder that it writes, if it is tutti's.
        commands: seconds of the whole command, in each round.
        jobs: seconds from the beginning of the first job to the end of the last.
        each: the median length of its jobs.
        accuracy: the mean of all jobs, of the last round.
    """

    command: Sequence[str]
    farm: Path | None = None
    commands: list[float] = field(default_factory=list)
    jobs: list[float] = field(default_factory=list)
    each: list[float] = field(default_factory=list)
    accuracy: float = math.nan

    def measure(self) -> None:
        command = list(self.command)
        if self.farm is not None:
            # Each time another folder: what was written before need not be deleted meanwhile.
            folder = self.farm / str(len(self.commands))
            command += ["--out", str(folder)]
        began = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        self.commands.append(time.perf_counter() - began)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        if self.farm is None:
            found = json.loads(done.stdout.splitlines()[-1])
            spans = [(one["began"], one["ended"]) for one in found]
            self.accuracy = mean(one["accuracy"] for one in found)
        else:
            spans = job_spans(folder)
            with open(folder / "scores.csv") as file:
                rows = [row for row in csv.DictReader(file) if row["of"].startswith("fold ")]
            self.accuracy = mean(float(row["score"]) for row in rows)
        self.jobs.append(max(ended for _, ended in spans) - min(began for began, _ in spans))
        self.each.append(median(ended - began for began, ended in spans))


def sides_of(
    args: argparse.Namespace,
    folder: Path,
    models: Sequence[str],
    schedules: Sequence[str],
    folds: int,
    epochs: int,
) -> dict[str, Side]:
    """The farm, and what works without one, by name; writes the question for the other programs."""
    file, question, cores = sample_file(args, folder), folder / "question.json", str(args.cores)
    asked = {"data": str(file), "models": models, "folds": folds, "epochs": epochs}
    # The programs of others have torch's schedulers, in which none is called constant.
    asked |= {"schedules": ["constant" if name == "none" else name for name in schedules]}
    question.write_text(json.dumps(asked | {"batch_size": args.batch_size, "cores": args.cores}))
    ours = [sys.executable, "-m", "tutti.cli.main", "cv", ",".join(models), "--data", str(file)]
    ours += ["--schedule", ",".join(schedules), "--folds", str(folds), "--epochs", str(epochs)]
    ours += ["--batch-size", str(args.batch_size), "--blocks", cores, "--threads", "1"]
    by_hand = [sys.executable, str(PROGRAMS / "folds.py"), str(question)]
    by_joblib = [sys.executable, str(PROGRAMS / "folds_with_joblib.py"), str(question)]
    return {
        FARM: Side(ours, folder / "farm"),
        ALONE: Side([*by_hand, "1"]),
        f"one process, {cores} threads": Side([*by_hand, cores]),
        "joblib (loky)": Side(by_joblib),
    }


def measure_in_turn(sides: Mapping[str, Side], rounds: int) -> None:
    """Measure each side once in each round; the first of several rounds does not count."""
    cold = rounds > 1
    for _ in range(rounds + cold):
        for side in sides.values():
            side.measure()
    for side in sides.values():
        for measured in (side.commands, side.jobs, side.each):
            del measured[: int(cold)]


def row(name: str, side: Side, ours: Side) -> list[str]:
    seconds = f"{median(side.commands):.2f}", f"{median(side.jobs):.2f}", f"{median(side.each):.2f}"
    against = ratio(side.commands, ours.commands), ratio(side.jobs, ours.jobs)
    return [name, *seconds, *(("", "") if side is ours else against), f"{100 * side.accuracy:.2f}"]


def ratio(these: Sequence[float], those: Sequence[float]) -> str:
    """The median of the ratios in each round, with the least and the greatest."""
    values = [one / other for one, other in zip(these, those, strict=True)]
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def sample_file(args: argparse.Namespace, folder: Path) -> Path:
    """An NPZ file with the first training samples of MNIST, or with noise of its shape."""
    path = folder / "samples.npz"
    if args.data == "mnist":
        from tutti.data.sources import read_source

        images, labels = read_source("mnist", {}).parts["train"]
    else:
        labels = np.arange(args.samples) % 10
        images = np.random.default_rng(0).integers(0, 256, (args.samples, 1, 28, 28), dtype=np.uint8)
    np.savez(path, x_train=images[: args.samples], y_train=labels[: args.samples])
    return path


def job_spans(farm: Path) -> list[tuple[float, float]]:
    """When each job began and ended."""
    from tutti.records.farm_folder import FarmFolder

    times: dict[str, list[float]] = {}
    for one in FarmFolder.open(farm).events().records:
        times.setdefault(one.job, []).append(one.time)
    return [(min(both), max(both)) for both in times.values()]


if __name__ == "__main__":
    main()
