"""Many trainings at once on a farm, beside one after the other and beside other tools.

    python benchmarks/farm.py [PART ...] [--quick] [--rounds 3] [--data mnist]

Parts, all by default:

    folds      lenet and mlp x 3 schedules x 5 folds, 6,000 samples: the farm, one process, other tools
    short      8 folds that last under a second each: never slower than one after the other
    overhead   how soon a job begins, and what a trial costs beyond its training loop
    memory     30 jobs on 2 blocks: how many copies of 450 MB of data are held
    virtual    1,024 simulated blocks and 10,000 jobs of log-normal length: how busy the blocks are
    pruning    searches that end trials early, and the same that do not

Sides are measured in turn; figures are medians. A ratio is that of two sides in the same round: the median,
with the least and the greatest in brackets. "command" is the time of the whole command, from its start to its
end, with the import of torch; "jobs" is the time from the beginning of the first job to the end of the last.
Other tools train by the same loop, with the same models, schedules, samples in memory, batches and epochs,
and one thread in each process: programs/folds*.py say how they are set. pip install 'tutti[bench]' brings
them.

On two cores that do nothing else the whole takes the better part of an hour; in about 20 minutes there is

    short overhead memory virtual
    folds --epochs 1 --rounds 2
    folds --epochs 5 --rounds 1
    pruning --searches 5 --samples 2000
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, median

import numpy as np
import psutil

PROGRAMS = Path(__file__).parent / "programs"
QUICK = "--rounds 1 --folds 2 --samples 600 --epochs 1 --trials 50 --images 20000 --searches 1"
SCHEDULES = "warm", "cosine", "plateau"
CLASSES = 10
PEERS = {
    "joblib (loky)": ("folds_with_joblib.py", ("joblib", "sklearn")),
    "Ray Tune": ("folds_with_ray.py", ("ray", "pandas", "pyarrow")),
    "Lightning + Optuna": ("folds_with_optuna.py", ("lightning", "optuna")),
}
FARM = "tutti cv"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help=f"small: {QUICK}")
    parser.add_argument("--data", default="mnist", choices=("mnist", "noise"), help="noise needs no files")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each side")
    parser.add_argument("--cores", type=int, default=len(os.sched_getaffinity(0)), help="for jobs at a time")
    parser.add_argument("--samples", type=int, default=6_000, help="of folds, short and pruning")
    parser.add_argument("--folds", type=int, default=5, help="of folds")
    parser.add_argument("--epochs", type=numbers, default=[1, 5], help="of folds, with commas; a table each")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--trials", type=int, default=1_000, help="of overhead")
    parser.add_argument("--images", type=int, default=600_000, help="of memory, 784 bytes each")
    parser.add_argument("--searches", type=int, default=10, help="of pruning")
    quick = "--quick" in sys.argv[1:]
    args = parser.parse_args([*QUICK.split(), *sys.argv[1:]] if quick else None)
    for name in args.parts:
        if name not in PARTS:
            parser.error(f"there is no part '{name}'; choose from {', '.join(PARTS)}")
    from measure import describe_machine

    print(describe_machine(), flush=True)
    for name in args.parts or PARTS:
        with tempfile.TemporaryDirectory(prefix="tutti-farm-") as folder:
            print(f"\n## {name}\n", flush=True)
            PARTS[name](args, Path(folder))


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


# --- folds


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

    def measure(self) -> float:
        command = list(self.command)
        if self.farm is not None:
            # Each time another folder: what was written before need not be deleted meanwhile.
            folder = self.farm / str(len(self.commands))
            command += ["--out", str(folder)]
        began = time.perf_counter()
        output = run(command)
        self.commands.append(time.perf_counter() - began)
        if self.farm is None:
            done = json.loads(output.splitlines()[-1])
            spans = [(one["began"], one["ended"]) for one in done]
            self.accuracy = mean(one["accuracy"] for one in done)
        else:
            spans = job_spans(folder)
            with open(folder / "scores.csv") as file:
                rows = [row for row in csv.DictReader(file) if row["of"].startswith("fold ")]
            self.accuracy = mean(float(row["score"]) for row in rows)
        self.jobs.append(max(ended for _, ended in spans) - min(began for began, _ in spans))
        self.each.append(median(ended - began for began, ended in spans))
        return self.commands[-1]


def show_folds(args: argparse.Namespace, folder: Path) -> None:
    file = sample_file(args, folder, args.samples)
    for at, epochs in enumerate(sorted(args.epochs)):
        models, folds = ("lenet", "mlp"), args.folds
        sides = sides_of(args, folder / f"{epochs}", file, models, SCHEDULES, folds, epochs)
        for name in one_block(args.cores):
            # Part short has it; here it would take a third of the time.
            del sides[name]
        missing = {}
        for name, (program, modules) in PEERS.items():
            if lacking := [module for module in modules if find_spec(module) is None]:
                missing[name] = ", ".join(lacking)
            else:
                question = folder / f"{epochs}" / "question.json"
                sides[name] = Side([sys.executable, str(PROGRAMS / program), str(question)])
        measure_in_turn(sides, args.rounds, warm=at > 0)
        jobs = len(models) * len(SCHEDULES) * folds
        print(
            f"{jobs} jobs: {' and '.join(models)} x {', '.join(SCHEDULES)} x {folds} folds of "
            f"{args.samples:,} samples, {epochs} epochs, batches of {args.batch_size}; "
            f"median of {args.rounds}\n"
        )
        show_sides(sides, args.cores)
        for name, modules in missing.items():
            print(f"\nNOT MEASURED: {name}: {modules} cannot be imported; pip install 'tutti[bench]'")
        ours = sides[FARM]
        one, several = sides["one process, 1 thread"], sides[all_threads(args.cores)]
        judge("the farm's speed / one process, 1 thread", ratios(one.commands, ours.commands), at_least=1.9)
        judge("the same, jobs alone", ratios(one.jobs, ours.jobs), at_least=1.9)
        judge(
            "the farm's speed / one process, all threads",
            ratios(several.commands, ours.commands),
            at_least=1.3,
        )
        judge("the same, jobs alone", ratios(several.jobs, ours.jobs), at_least=1.3)
        peers = [sides[name] for name in PEERS if name in sides]
        if peers:
            fastest = min(peers, key=lambda side: median(side.commands))
            alone = min(peers, key=lambda side: median(side.jobs))
            short = median(ours.each) < 5
            goal = 3.0 if short else 1.0
            length = f"jobs of {median(ours.each):.1f} s"
            judge(
                f"the farm's speed / the fastest other tool's, {length}",
                ratios(fastest.commands, ours.commands),
                at_least=goal,
            )
            judge("the same, jobs alone", ratios(alone.jobs, ours.jobs), at_least=goal)
        print(flush=True)


def show_short(args: argparse.Namespace, folder: Path) -> None:
    file = sample_file(args, folder, args.samples)
    sides = sides_of(args, folder / "short", file, ("mlp",), ("none",), folds=8, epochs=2)
    measure_in_turn(sides, args.rounds)
    print(f"8 folds of the mlp, {args.samples:,} samples, 2 epochs; median of {args.rounds}\n")
    show_sides(sides, args.cores)
    ours = sides[FARM]
    judge("a fold, s", sides["one process, 1 thread"].each, at_most=1.0)
    for name, side in sides.items():
        if name != FARM:
            judge(f"{name} / the farm", ratios(side.commands, ours.commands), at_least=1.0, always=True)
            judge("the same, jobs alone", ratios(side.jobs, ours.jobs), at_least=1.0, always=True)


def sides_of(
    args: argparse.Namespace,
    folder: Path,
    file: Path,
    models: Sequence[str],
    schedules: Sequence[str],
    folds: int,
    epochs: int,
) -> dict[str, Side]:
    """The farm and what works without one, by name; writes the question for other programs."""
    folder.mkdir(parents=True)
    question = folder / "question.json"
    question.write_text(
        json.dumps(
            {
                "data": str(file),
                "models": models,
                # The programs of others have torch's schedulers, in which none is called constant.
                "schedules": ["constant" if name == "none" else name for name in schedules],
                "folds": folds,
                "epochs": epochs,
                "batch_size": args.batch_size,
                "cores": args.cores,
            }
        )
    )
    ours = [sys.executable, "-m", "tutti.cli.main", "cv", ",".join(models), "--data", str(file)]
    ours += ["--schedule", ",".join(schedules), "--folds", str(folds), "--epochs", str(epochs)]
    ours += ["--batch-size", str(args.batch_size)]
    by_hand = [sys.executable, str(PROGRAMS / "folds.py"), str(question)]
    cores = str(args.cores)
    return {
        FARM: Side([*ours, "--blocks", cores, "--threads", "1"], folder / "farm"),
        **{
            name: Side([*ours, "--blocks", "1", "--threads", str(threads)], folder / f"wide-{threads}")
            for name, threads in one_block(args.cores).items()
        },
        "one process, 1 thread": Side([*by_hand, "1"]),
        all_threads(args.cores): Side([*by_hand, cores]),
    }


def one_block(cores: int) -> dict[str, int]:
    """The sides that are farms of a single block, with its threads."""
    return {f"{FARM}, 1 block, 1 thread": 1, f"{FARM}, 1 block, {cores} threads": cores}


def all_threads(cores: int) -> str:
    return f"one process, {cores} threads"


def measure_in_turn(sides: Mapping[str, Side], rounds: int, warm: bool = False) -> None:
    """Measure each side once in each round; the first of several counts only if all is warm."""
    cold = rounds > 1 and not warm
    for _ in range(rounds + cold):
        for side in sides.values():
            side.measure()
    for side in sides.values():
        for measured in (side.commands, side.jobs, side.each):
            del measured[: int(cold)]


def show_sides(sides: Mapping[str, Side], cores: int) -> None:
    from measure import table

    ours = sides[FARM]
    rows = []
    for name, side in sides.items():
        seconds = f"{median(side.commands):.2f}", f"{median(side.jobs):.2f}", f"{median(side.each):.2f}"
        against = "", ""
        if side is not ours:
            against = (
                spread(ratios(side.commands, ours.commands)),
                spread(ratios(side.jobs, ours.jobs)),
            )
        label = f"{name}, {cores} blocks" if name == FARM else name
        rows.append([label, *seconds, *against, f"{100 * side.accuracy:.2f}"])
    heads = ["side", "command s", "jobs s", "a job s", "command / farm's", "jobs / farm's", "accuracy %"]
    print(table(heads, rows))
    print()


# --- overhead


STAMPED = """
import os, time
from torch.nn.functional import cross_entropy

def loss(outputs, targets):
    with open(os.environ["FIRST_STEPS"], "a") as file:
        file.write(f"{time.time()!r}\\n")
    return cross_entropy(outputs, targets)
"""
STEPS, BATCH, HIDDEN = 20, 32, [32]


def show_overhead(args: argparse.Namespace, folder: Path) -> None:
    from tutti.launch.placement import place_ranks
    from tutti.launch.start import start

    sys.path.insert(0, str(PROGRAMS))
    file = folder / "small.npz"
    rng = np.random.default_rng(0)
    samples = rng.standard_normal((320, 64), dtype=np.float32), np.arange(320) % CLASSES
    np.savez(file, x_train=samples[0], y_train=samples[1])
    given = {"data": str(file), "trials": args.trials, "hidden": HIDDEN, "steps": STEPS, "batch_size": BATCH}
    payload = json.dumps(given).encode()
    per_trial, inside, ends, bare = [], [], [], []
    for number in range(args.rounds):
        farm = work_through(folder / f"farm-{number}", file, args.trials)
        loop = start("bare_trials:work", payload, place_ranks("1", 1))
        bare.append(1e3 * loop / args.trials)
        per_trial.append(1e3 * (farm.seconds - loop) / args.trials)
        inside.append(1e3 * (farm.seconds - farm.training) / args.trials)
        ends.append(farm.outside)
    stamps = folder / "stamps"
    (folder / "stamped.py").write_text(STAMPED)
    os.environ["FIRST_STEPS"] = str(stamps)
    jobs = min(100, args.trials)
    work_through(folder / "stamped", file, jobs, loss=f"{folder / 'stamped.py'}:loss")
    times = [float(line) for line in stamps.read_text().splitlines()]
    begins = [time for time, event, _ in events_of(folder / "stamped") if event == "began"]
    waits = sorted(1e3 * (min(t for t in times if t > begin) - begin) for begin in begins)
    print(
        f"an mlp, {STEPS} steps of {BATCH} samples a trial ({median(bare):.1f} ms by the bare loop), "
        f"{args.trials:,} trials on 1 block; median of {args.rounds}\n"
    )
    judge("a trial beyond the bare loop, ms", per_trial, at_most=5.0)
    judge("a trial beyond the run's own training time, ms", inside)
    judge("starting and ending the farm, s", ends)
    judge(f"start of a job, to its first loss, ms ({jobs} jobs)", waits[1:], at_most=50.0)
    judge("the first job, which reads the data, ms", [1e3 * (times[0] - begins[0])])


@dataclass(frozen=True)
class Worked:
    """What a farm took: from its first job to its last, before and after, and for training alone."""

    seconds: float
    outside: float
    training: float


def work_through(folder: Path, file: Path, trials: int, loss: str = "auto") -> Worked:
    """Have one block do so many small jobs."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.farm.job_list import JobList

    from tutti.farm.jobs import FarmJob
    from tutti.farm.work import work_on
    from tutti.records.farm_folder import FarmFolder
    from tutti.records.run import Summary
    from tutti.records.run_folder import RunFolder
    from tutti.run.config import TrainConfig

    config = {"model": "mlp", "model_options": {"hidden": HIDDEN}, "data": str(file), "validation": 0.0}
    config |= {"steps": STEPS, "batch_size": BATCH, "loss": loss}
    jobs = [FarmJob(f"trial-{n:04}", TrainConfig(**config, seed=n)) for n in range(trials)]
    farm = FarmFolder.begin(folder, "benchmark", {}, {job.name: job.config.as_json() for job in jobs})
    began = time.perf_counter()
    outcome = work_on(farm, JobList(jobs), blocks=1, threads=1)
    whole = time.perf_counter() - began
    for job in jobs:
        if (error := farm.error(job.name)) is not None:
            raise SystemExit(f"{job.name} failed:\n{error}")
    runs = [RunFolder(farm.job(job.name)) for job in jobs]
    return Worked(outcome.seconds, whole - outcome.seconds, sum(run.read(Summary).seconds for run in runs))


# --- memory


def show_memory(args: argparse.Namespace, folder: Path) -> None:
    from measure import table

    sizes = args.images // 10, args.images
    nbytes = [size * 28 * 28 for size in sizes]
    held: list[float] = []
    most: list[float] = []
    rows = []
    for size in sizes:
        file = noise_file(folder / f"{size}.npz", size)
        usual, peak = memory_of(file, folder / f"farm-{size}")
        held.append(usual)
        most.append(peak)
        rows.append([f"{size:,}", *(f"{value / 2**20:.0f}" for value in (size * 28 * 28, usual, peak))])
    print("30 jobs on 2 blocks; proportional set size of all processes, in MiB\n")
    print(table(["images", "data", "median while jobs run", "at most"], rows))
    print()
    more = nbytes[1] - nbytes[0]
    judge("copies of the data held: more memory / more data", [(held[1] - held[0]) / more], at_most=1.1)
    judge("the same at the fullest moment", [(most[1] - most[0]) / more])


def memory_of(file: Path, out: Path) -> tuple[float, float]:
    """Bytes of a farm's processes while it works: the median and the most."""
    command = [sys.executable, "-m", "tutti.cli.main", "cv", "mlp", "--data", str(file), "--folds", "10"]
    # As many updates whatever the samples: what training itself takes grows a little with them.
    command += ["--schedule", ",".join(SCHEDULES), "--steps", "200", "--batch-size", "256"]
    command += ["--blocks", "2", "--threads", "1", "--out", str(out)]
    job = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    found: list[int] = []
    while job.poll() is None:
        ended = sum(event == "ended" for _, event, _ in events_of(out))
        # Both blocks have mapped the data by then, and both still have work.
        if 4 <= ended < 28 and (size := tree_bytes(job.pid)):
            found.append(size)
        time.sleep(0.05)
    if job.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {job.returncode}")
    if not found:
        raise SystemExit("the farm was over before its memory could be looked at; use more --images")
    return median(found), max(found)


def tree_bytes(pid: int) -> int:
    """The proportional set size of a process and its descendants; 0: one of them has just ended."""
    try:
        process = psutil.Process(pid)
        return sum(one.memory_full_info().pss for one in [process, *process.children(recursive=True)])
    except psutil.Error:
        return 0


# --- virtual


def show_virtual(args: argparse.Namespace, folder: Path) -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.farm.job_list import JobList
    from tests.farm.virtual_pool import Course, VirtualPool

    from measure import table
    from tutti.farm.coordinator import Coordinator
    from tutti.farm.jobs import FarmJob
    from tutti.run.config import TrainConfig

    blocks, jobs, seeds, config = 1024, 10_000, args.rounds, TrainConfig()
    rows, least = [], {}
    for sigma in (0.25, 0.5, 0.75, 1.0):
        known, unknown, possible = [], [], []
        for seed in range(seeds):
            draw = random.Random(seed)
            lengths = {f"job-{n}": draw.lognormvariate(4, sigma) for n in range(jobs)}
            for guessed, found in ((True, known), (False, unknown)):
                names = sorted(lengths, key=lambda name: -lengths[name]) if guessed else list(lengths)
                source = JobList(FarmJob(name, config) for name in names)
                pool = VirtualPool(blocks, lambda job, lengths=lengths: Course(lengths[job.name]))
                outcome = Coordinator(pool, source).run()
                found.append(outcome.busy_s / (outcome.seconds * blocks))
            total, longest = sum(lengths.values()), max(lengths.values())
            possible.append(total / (blocks * max(longest, total / blocks)))
        least[sigma] = min(known)
        rows.append([f"{sigma}", *(f"{100 * min(found):.2f}" for found in (known, unknown, possible))])
    print(f"utilisation in %, {blocks:,} blocks, {jobs:,} jobs; the least of {seeds} draws of lengths\n")
    print(table(["sigma of log length", "lengths guessed right", "all guessed alike", "at best"], rows))
    print()
    judge("utilisation with sigma 0.5, longest first", [least[0.5]], at_least=0.97)


# --- pruning


def show_pruning(args: argparse.Namespace, folder: Path) -> None:
    if find_spec("tutti.cli.tune") is None or find_spec("optuna") is None:
        print("NOT MEASURED: 'tutti tune' or Optuna is missing: pip install 'tutti[tune]'")
        return
    from measure import table

    file = sample_file(args, folder, args.samples)
    rows, saved, same = [], [], 0
    for seed in range(args.searches):
        whole = search(file, folder / f"{seed}-whole", seed, "none")
        pruned = search(file, folder / f"{seed}-pruned", seed, "asha")
        saved.append(1 - pruned.epochs / whole.epochs)
        same += pruned.winner == whole.winner
        rows.append(
            [
                seed,
                whole.epochs,
                pruned.epochs,
                f"{saved[-1]:.0%}",
                whole.winner,
                pruned.winner,
                f"{100 * whole.score:.2f}",
                f"{100 * pruned.score:.2f}",
            ]
        )
    print(
        "searches of the mlp's rate and width, 27 random trials of 9 epochs, the same with and without ASHA; "
        f"{args.samples:,} samples\n"
    )
    heads = ["seed", "epochs", "with ASHA", "saved", "winner", "with ASHA", "its accuracy %", "with ASHA"]
    print(table(heads, rows))
    print()
    judge("share of epochs saved", saved, at_least=0.4)
    judge(f"same winner, of {args.searches} searches", [same], at_least=0.9 * args.searches)


@dataclass(frozen=True)
class Searched:
    """What a search has found: the epochs of all trials, the best trial and its accuracy."""

    epochs: int
    winner: str
    score: float


def search(file: Path, out: Path, seed: int, pruner: str) -> Searched:
    command = [sys.executable, "-m", "tutti.cli.main", "tune", "mlp", "--data", str(file)]
    command += ["--space.lr", "log:1e-4..1e-1", "--space.model.hidden", "16,64,256"]
    # Random: the sampler proposes the same trials whatever has been pruned.
    command += ["--sampler", "random", "--pruner", pruner, "--trials", "27", "--epochs", "9"]
    run([*command, "--validation", "0.2", "--seed", str(seed), "--out", str(out)])
    epochs = sum(len(path.read_text().splitlines()) for path in out.glob("jobs/**/history.jsonl"))
    return Searched(epochs, *best_trial(out))


def best_trial(out: Path) -> tuple[str, float]:
    with open(out / "trials.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["state"] == "complete"]
    best = max(rows, key=lambda row: float(row["accuracy"]))
    return best["trial"], float(best["accuracy"])


# --- what all of them need


def run(command: Sequence[str]) -> str:
    """Run a command and return what it has printed."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def sample_file(args: argparse.Namespace, folder: Path, samples: int) -> Path:
    """An NPZ file with the first training samples of MNIST, or with noise of its shape."""
    path = folder / "samples.npz"
    if args.data == "noise":
        return noise_file(path, samples)
    from tutti.data.sources import read_source

    images, labels = read_source("mnist", {}).parts["train"]
    np.savez(path, x_train=images[:samples], y_train=labels[:samples])
    return path


def noise_file(path: Path, samples: int) -> Path:
    """Noise in which some pixels depend on the class."""
    rng = np.random.default_rng(0)
    labels = np.arange(samples) % CLASSES
    images = rng.integers(0, 256, (samples, 1, 28, 28), dtype=np.uint8)
    for label in range(CLASSES):
        images[labels == label, :, 2 * label : 2 * label + 4] |= 128
    np.savez(path, x_train=images, y_train=labels)
    return path


def events_of(farm: Path) -> list[tuple[float, str, str]]:
    """When which job began or ended, as far as it is written."""
    from tutti.records.farm_folder import FARM, FarmFolder

    # Written whole, and first of all.
    if not (farm / FARM).is_file():
        return []
    return [(one.time, one.event, one.job) for one in FarmFolder.open(farm).events().records]


def job_spans(farm: Path) -> list[tuple[float, float]]:
    """When each job began and ended."""
    times: dict[str, list[float]] = {}
    for when, _, job in events_of(farm):
        times.setdefault(job, []).append(when)
    return [(min(both), max(both)) for both in times.values()]


def ratios(these: Sequence[float], those: Sequence[float]) -> list[float]:
    """Of each round, one side's figure / another's."""
    return [one / other for one, other in zip(these, those, strict=True)]


def spread(values: Sequence[float]) -> str:
    """The median, with the least and the greatest."""
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def judge(
    what: str,
    values: Sequence[float],
    *,
    at_least: float | None = None,
    at_most: float | None = None,
    always: bool = False,
) -> None:
    """Print a figure beside what was wanted of its median, or of all of its values."""
    verdict = ""
    if at_least is not None:
        reached = (min(values) if always else median(values)) >= at_least
        verdict = f"; wanted: at least {at_least:g}: {'reached' if reached else 'MISSED'}"
    elif at_most is not None:
        reached = (max(values) if always else median(values)) <= at_most
        verdict = f"; wanted: at most {at_most:g}: {'reached' if reached else 'MISSED'}"
    print(f"- {what}: {spread(values)}{verdict}", flush=True)


PARTS: dict[str, Callable[[argparse.Namespace, Path], None]] = {
    "folds": show_folds,
    "short": show_short,
    "overhead": show_overhead,
    "memory": show_memory,
    "virtual": show_virtual,
    "pruning": show_pruning,
}


if __name__ == "__main__":
    main()
