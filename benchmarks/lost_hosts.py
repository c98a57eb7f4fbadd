"""The cost of a lost host: a training on three hosts, one of which stands by, loses one that trains.

    python benchmarks/lost_hosts.py [--losses 8]

The hosts are network namespaces of this machine, with processes of their own (it needs root, and mpirun). One
that is lost is taken off the network, and all that runs on it is killed, or goes on unseen ("cut off").
The time is taken from then until all ranks have finished another step. Beside it, what a new rank cannot do
without: the import of torch, in processes of as many hosts at once.

Wanted: the next step within 5 s beside that import, exit code 0, and the weights of the undisturbed training.
"""

from __future__ import annotations

import argparse
import os
import random
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from measure import describe_machine, table

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.cluster.hosts import Hosts, why_not

from tutti.exports.sources import read_from

TIMED = Path(__file__).parent / "programs" / "timed_steps.py"

TRAIN = (
    *("train", "lenet", "--data", "mnist", "--epochs", "2", "--batch-size", "256", "--precision", "fp64"),
    *("--threads", "1", "--callbacks", f"{TIMED}:Timed"),
)

SETTLED_S = 0.5
"""Time in which the last step before a loss is finished, which may have been under way."""

LIMIT_S = 300.0
"""Time of a training until it counts as one that nothing ends."""


def steps_of(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """The steps that each process has finished, and when."""
    return {
        file.name: [(int(step), float(at)) for step, at in map(str.split, file.read_text().splitlines())]
        for file in folder.iterdir()
    }


def import_s(hosts: Hosts) -> float:
    """The seconds until torch is imported on two hosts at once."""
    began = time.monotonic()
    programs = [
        subprocess.Popen(hosts.on(host, [sys.executable, "-c", "import torch._dynamo"]))
        for host in hosts.names[:2]
    ]
    for program in programs:
        program.wait()
    return time.monotonic() - began


def lose(way: str, victim: str, after_s: float, folder: Path) -> tuple[float, float, int, float]:
    """Lose a host.

    Args:
        way: "killed" or "cut off".
        victim: the host.
        after_s: seconds after the first steps.
        folder: for the run and its notes.

    Returns:
        The seconds from then until all ranks have finished another step, those of the import of torch, the
        exit code, and the largest difference from the weights of an undisturbed training.
    """
    notes, alone, survived = folder / "notes", folder / "alone", folder / "survived"
    for one in (notes, folder / "other"):
        one.mkdir()
    tutti = [sys.executable, "-m", "tutti", *TRAIN]
    with Hosts(["a", "b", "c"], apart=True) as hosts:
        given = [word for word in hosts.mpirun_arguments if word != "--allow-run-as-root"]
        words = shlex.join([*given, "-x", "TIMED_STEPS"])
        environment = {**os.environ, **hosts.settings, "TUTTI_MPIRUN_ARGS": words}
        imported_s = import_s(hosts)
        placed = ["--hosts", "a:1,b:1,c:1", "-n", "2"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(
            hosts.on("a", [*tutti, *placed, "--out", str(alone)]),
            env={**environment, "TIMED_STEPS": str(folder / "other")},
            check=True,
            timeout=LIMIT_S,
            **quiet,
        )
        program = subprocess.Popen(
            hosts.on("a", [*tutti, *placed, "--on-failure", "respawn", "--out", str(survived)]),
            env={**environment, "TIMED_STEPS": str(notes)},
            **quiet,
        )
        deadline = time.monotonic() + LIMIT_S
        while len(steps_of(notes)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(after_s)
        lost_at = time.monotonic()
        (hosts.kill if way == "killed" else hosts.cut_off)(victim)
        code = program.wait(LIMIT_S)
    later = ([at for _, at in steps if at > lost_at + SETTLED_S] for steps in steps_of(notes).values())
    began = sorted(min(times) for times in later if times)
    before, after = (read_from(one).weights for one in (alone, survived))
    apart = max(float((before[name] - after[name]).abs().max()) for name in before)
    return (began[-1] if began else float("nan")) - lost_at, imported_s, code, apart


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    print(describe_machine())
    torch.set_num_threads(1)
    draws = random.Random(options.seed)
    rows = []
    for number in range(options.losses):
        way = ("killed", "cut off")[number % 2]
        with tempfile.TemporaryDirectory() as name:
            found = lose(way, "b", draws.uniform(0.5, 4.0), Path(name))
        rows.append((way, *found))
        print(*rows[-1], flush=True)
    lines = []
    for way in ("killed", "cut off"):
        own = [row for row in rows if row[0] == way]
        nexts, imports = [row[1] for row in own], [row[2] for row in own]
        codes, apart = {row[3] for row in own}, max(row[4] for row in own)
        beside = max(step - imported for _, step, imported, *_ in own)
        lines.append(
            [
                *(way, len(own), f"{median(nexts):.1f}", f"{max(nexts):.1f}", f"{median(imports):.1f}"),
                *(f"{beside:.1f}", f"{codes}", f"{apart:.1g}"),
            ]
        )
    heads = ["host", "losses", "next step, s", "most", "import of torch, s", "most beside it, s"]
    print(table([*heads, "exit codes", "weights apart"], lines))


if __name__ == "__main__":
    main()
