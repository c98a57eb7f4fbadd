"""Speed on cores that other programs use too: four endless loops beside each way to train.

    python benchmarks/busy.py [--seconds 10] [--rounds 3] [--models mlp,lenet]

Each way trains with as many threads as there are cores, alone and beside the loops, in turn. Its fair share
is that of its threads among all: with 2 threads and 4 loops a third of the speed that it has alone. Medians.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median

LOOPS = 4
WANTED = 0.7
PROGRAM = Path(__file__).parent / "programs" / "steady.py"


def main() -> None:
    from measure import describe_machine, table

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=10, help="of each training (10)")
    parser.add_argument("--rounds", type=int, default=3, help="trainings of each side (3)")
    parser.add_argument("--models", default="mlp,lenet")
    args = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    run = [str(Path(sys.executable).parent / "tutti"), "run", "-n"]
    ways = {
        f"tutti train, 1 rank x {cores}": [sys.executable, PROGRAM, "1"],
        f"tutti train, {cores} ranks x 1": [sys.executable, PROGRAM, str(cores)],
        f"own loop, 1 rank x {cores}": [*run, "1", PROGRAM, "own_loop"],
        f"own loop, {cores} ranks x 1": [*run, str(cores), PROGRAM, "own_loop"],
        f"DDP over tutti, {cores} ranks x 1": [*run, str(cores), PROGRAM, "ddp"],
    }
    fair = cores / (cores + LOOPS)
    print(describe_machine())
    rows = []
    for model in args.models.split(","):
        for way, command in ways.items():
            rates = {loops: [] for loops in (0, LOOPS)}
            for _ in range(args.rounds):
                for loops, measured in rates.items():
                    measured.append(rate([*command, model, str(args.seconds)], loops))
            alone, busy = (median(measured) for measured in rates.values())
            share = busy / alone / fair
            verdict = "reached" if share >= WANTED else "MISSED"
            rows.append([f"{model}, {way}", f"{alone:,.0f}", f"{busy:,.0f}", f"{share:.2f}", verdict])
    heads = ["way", "alone", f"beside {LOOPS} loops", "of the fair share", f"at least {WANTED}"]
    print(table(heads, rows))


def rate(command: list[object], loops: int) -> float:
    """Return the samples per second of a training beside endless loops."""
    with ExitStack() as running:
        for _ in range(loops):
            loop = running.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            running.callback(loop.kill)
        output = subprocess.run([*map(str, command)], capture_output=True, text=True, check=True).stdout
    return float(output.split("samples/s")[1].split()[0])


if __name__ == "__main__":
    main()
