"""From the kill of a rank to the next step of all: lenet on mnist, fp64, `--on-failure respawn`.

    python benchmarks/recovery.py [--kills 5] [--rounds 4] [--ranks 2 4] [--strategy sync] [--before SRC]

Each rank stores its process, its step and the time of the step in a file that the ranks map. Ranks are killed
at random moments, half a second after the last recovery. At the end of each round the weights are compared,
bit for bit, with those of a training that was left alone. The `src` folder of another version takes turns.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from safetensors.numpy import load_file

from measure import describe_machine, table

CALLBACK = """
import os, time
import numpy as np
import tutti

class Stamp(tutti.Callback):
    def step(self, course):
        row = np.memmap("stamps", np.int64, "r+", shape=(16, 3))[course.rank]
        row[:] = os.getpid(), course.step, time.monotonic_ns()
"""
WANTED_MS = {2: 300, 4: 400}


class Training:
    """A training in a folder, whose ranks stamp each step."""

    def __init__(self, ranks: int, strategy: str, steps: int, source: str = "") -> None:
        self.ranks = ranks
        self.folder = Path(tempfile.mkdtemp(prefix="recovery-"))
        (self.folder / "stamp.py").write_text(CALLBACK)
        np.zeros((16, 3), np.int64).tofile(self.folder / "stamps")
        self.stamps = np.memmap(self.folder / "stamps", np.int64, "r", shape=(16, 3))[:ranks]
        tutti = Path(sys.executable).parent / "tutti"
        command = (
            f"{tutti} train lenet --data mnist --precision fp64 --steps {steps} --out run "
            f"-n {ranks} --threads 1 --strategy {strategy} --callbacks stamp.py:Stamp "
            "--on-failure respawn"
        )
        self.process = subprocess.Popen(
            command.split(),
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": source},
        )

    def wait_for_steps(self, since_ns: int, killed: int = 0) -> float | None:
        """Wait until all ranks have made a step after `since_ns`; return the ms, None at the run's end."""
        while self.process.poll() is None:
            stamps = np.array(self.stamps)
            if (stamps[:, 2] > since_ns).all() and killed not in stamps[:, 0]:
                return (stamps[:, 2].max() - since_ns) / 1e6
            time.sleep(0.001)
        return None

    def weights(self) -> bytes:
        """Return the final weights."""
        if self.process.wait():
            sys.exit(f"the training in {self.folder} failed")
        state = load_file(self.folder / "run" / "weights.safetensors")
        shutil.rmtree(self.folder)
        return b"".join(value.tobytes() for _, value in sorted(state.items()))


def kill_often(training: Training, kills: int) -> list[float]:
    """Kill ranks of a training; return for each kill the ms until all ranks have made a step."""
    if training.wait_for_steps(0) is None:
        sys.exit(f"the training in {training.folder} ended at once")
    times = []
    for _ in range(kills):
        time.sleep(0.5 + random.random() / 2)
        process = int(training.stamps[random.randrange(training.ranks), 0])
        killed_at = time.monotonic_ns()
        os.kill(process, signal.SIGKILL)
        waited = training.wait_for_steps(killed_at, process)
        if waited is None:
            break
        times.append(waited)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=5, help="in each round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--strategy", default="sync")
    parser.add_argument("--steps", type=int, default=0, help="by default as many as the kills take")
    parser.add_argument("--before", default="", help="the src folder of another version")
    args = parser.parse_args()
    print(describe_machine(), flush=True)
    random.seed(0)
    rows = []
    for ranks in args.ranks:
        steps = args.steps or 200 * args.kills
        alone = Training(ranks, args.strategy, steps).weights()
        sources = {"now": "", "before": args.before} if args.before else {"now": ""}
        times: dict[str, list[float]] = {name: [] for name in sources}
        loads: list[float] = []
        same = dict.fromkeys(sources, True)
        for name in [*sources] * args.rounds:
            training = Training(ranks, args.strategy, steps, sources[name])
            times[name] += kill_often(training, args.kills)
            loads.append(os.getloadavg()[0])
            same[name] &= training.weights() == alone
        for name, found in times.items():
            verdict = "reached" if median(found) <= WANTED_MS.get(ranks, 1000) else "MISSED"
            survived = f"{len(found)} of {args.kills * args.rounds}"
            spread = f"{min(found):.0f} to {max(found):.0f}"
            load = f"{min(loads):.1f} to {max(loads):.1f}"
            whole = "yes" if same[name] else "NO"
            rows.append([ranks, name, survived, f"{median(found):.0f}", spread, whole, load, verdict])
            print(*rows[-1], *map(round, found), flush=True)
    titles = [
        "ranks",
        "version",
        "survived",
        "next step, ms",
        "least to most",
        "same weights",
        "load",
        "wanted",
    ]
    print(table(titles, rows))


if __name__ == "__main__":
    main()
