"""The cost of a lost host: a training on three hosts, one of which stands by, loses one that trains.

    python benchmarks/lost_hosts.py [--losses 8]
    python benchmarks/lost_hosts.py --kills 25     a rank of another host is killed, again and again

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
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
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

PAUSE_S = 8.0
"""The least time from a loss of a rank to the next one: others may be ready by then. Up to 3 s come to it."""

EPOCHS_OF_A_KILL = 3.0
"""Epochs in which there is the time for a kill, on a fast machine."""

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


class Trial:
    """A training on hosts, and the same undisturbed.

    Args:
        hosts: of both; the first has the launching process.
        folder: for the runs and their notes.
        placed: the options of both.
    """

    def __init__(self, hosts: Hosts, folder: Path, placed: list[str]) -> None:
        self._hosts, self._folder = hosts, folder
        self._command = [sys.executable, "-m", "tutti", *TRAIN, *placed]
        given = [word for word in hosts.mpirun_arguments if word != "--allow-run-as-root"]
        words = shlex.join([*given, "-x", "TIMED_STEPS"])
        self._environment = {**os.environ, **hosts.settings, "TUTTI_MPIRUN_ARGS": words}

    def begin(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        """Start it, and return when all ranks have finished a step."""
        self.notes = self._folder / f"{name}-notes"
        self.notes.mkdir()
        program = subprocess.Popen(
            self._hosts.on("a", [*self._command, *options, "--out", str(self._folder / name)]),
            env={**self._environment, "TIMED_STEPS": str(self.notes)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + LIMIT_S
        while len(steps_of(self.notes)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        return program

    def next_s(self, lose: Callable[[], None]) -> float:
        """The seconds from a loss until both of the ranks that go on have finished a step."""
        before, lost_at = set(steps_of(self.notes)), time.monotonic()
        lose()
        while time.monotonic() < lost_at + LIMIT_S:
            new = [steps for name, steps in steps_of(self.notes).items() if name not in before and steps]
            if len(new) >= 2:
                return max(steps[0][1] for steps in new) - lost_at
            time.sleep(0.02)
        return float("nan")

    def apart(self, one: str, other: str) -> float:
        """The largest difference between the weights of two runs."""
        before, after = (read_from(self._folder / name).weights for name in (one, other))
        return max(float((before[name] - after[name]).abs().max()) for name in before)


def lose(way: str, victim: str, after_s: float, folder: Path) -> tuple[float, float, int, float]:
    """Lose a host.

    Args:
        way: "killed" or "cut off".
        victim: the host.
        after_s: seconds after the first steps.
        folder: for the runs and their notes.

    Returns:
        The seconds from then until all ranks have finished another step, those of the import of torch, the
        exit code, and the largest difference from the weights of an undisturbed training.
    """
    with Hosts(["a", "b", "c"], apart=True) as hosts:
        imported_s = import_s(hosts)
        trial = Trial(hosts, folder, ["--hosts", "a:1,b:1,c:1", "-n", "2"])
        trial.begin("alone").wait(LIMIT_S)
        program = trial.begin("survived", "--on-failure", "respawn")
        time.sleep(after_s)
        next_s = trial.next_s(lambda: (hosts.kill if way == "killed" else hosts.cut_off)(victim))
        code = program.wait(LIMIT_S)
    return next_s, imported_s, code, trial.apart("alone", "survived")


def lose_ranks(
    kills: int, epochs: float, pause_s: float, draws: random.Random, folder: Path
) -> tuple[list[float], int, float]:
    """Kill ranks of another host, one after the other.

    Returns:
        The seconds until all ranks have finished another step, the exit code, and the largest difference from
        the weights of an undisturbed training.
    """
    with Hosts(["a", "b"], apart=True) as hosts:
        placed = ["--hosts", "a:1,b:1", "-n", "2", "--epochs", str(2 + round(epochs * kills))]
        trial = Trial(hosts, folder, placed)
        program = trial.begin("survived", "--on-failure", "respawn", "--max-failures", str(kills))
        nexts = []
        for _ in range(kills):
            time.sleep(pause_s + draws.uniform(0, 3))
            victim = rank_on(hosts, "b", trial.notes)
            nexts.append(trial.next_s(partial(os.kill, victim, signal.SIGKILL)))
            print(f"{nexts[-1]:.2f}", end=" ", flush=True)
        print()
        code = program.wait(10 * LIMIT_S)
        trial.begin("alone").wait(10 * LIMIT_S)
    return nexts, code, trial.apart("alone", "survived")


def is_rank(process: int) -> bool:
    """Tell whether a process is a rank: mpirun has the same words, and more; its parent is its witness."""
    parent = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1]
    words = [Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0")[1:-1] for one in (process, parent)]
    return words == 2 * [[b"-P", b"-m", b"tutti.launch.mpi_rank"]]


def rank_on(hosts: Hosts, host: str, notes: Path) -> int:
    """The rank of a host that trains: whose notes are the newest."""
    newest = max(notes.glob(f"*-{host}-*"), key=lambda file: file.stat().st_mtime)
    number = newest.name.rpartition("-")[2]
    (found,) = [one for one in hosts.processes(host) if is_rank(one) and number_within(one) == number]
    return found


def number_within(process: int) -> str:
    """The number that a process has on its own host."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(line.split()[-1] for line in lines if line.startswith("NSpid:"))


def print_killed_ranks(kills: int, epochs: float, pause_s: float, draws: random.Random) -> None:
    """Print what lost ranks of another host cost, in a training of so many epochs for each."""
    with tempfile.TemporaryDirectory() as name:
        nexts, code, apart = lose_ranks(kills, epochs, pause_s, draws, Path(name))
    took = sorted(nexts)
    p95 = took[min(len(took) - 1, int(0.95 * len(took)))]
    survived = sum(one == one for one in nexts)
    line = [f"{survived} of {kills}", f"{median(took):.2f}", f"{p95:.2f}", code, f"{apart:.1g}"]
    print(table(["survived", "next step, s", "p95", "exit code", "weights apart"], [line]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--losses", type=int, default=8)
    parser.add_argument("--kills", type=int, help="of ranks, in place of losses of hosts")
    parser.add_argument("--epochs-per-kill", type=float, default=EPOCHS_OF_A_KILL)
    parser.add_argument("--pause", type=float, default=PAUSE_S, metavar="S", help="between kills, at least")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    print(describe_machine())
    torch.set_num_threads(1)
    draws = random.Random(options.seed)
    if options.kills is not None:
        print_killed_ranks(options.kills, options.epochs_per_kill, options.pause, draws)
        return
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
