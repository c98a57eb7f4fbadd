"""The cost of a lost rank: trainings with `--on-failure respawn` and `shrink` whose ranks are killed.

    python benchmarks/chaos.py [--kills 20] [--ranks 2 4] [--strategies sync hogwild] [--rounds 3]

After each kill the time is taken until a rank finishes the next step, and until the run is as far as it was;
ranks and moments are drawn at random. The final weights are compared with those of a run that was left alone,
in fp64. Then the cost when nothing fails: the same run with and without `--on-failure respawn`, in turn.

Wanted: all kills survived, the next step within 0.1 s (shrink) or 0.15 s (respawn), at most 1 % otherwise.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from safetensors.torch import load_file

from measure import describe_machine, interleave, medians, table

CALLBACK = """
import mmap, os, struct, time
import tutti

class Progress(tutti.Callback):
    def begin(self, course):
        file = os.open(os.environ["CHAOS_PROGRESS"], os.O_RDWR)
        self._page, self._at = mmap.mmap(file, 4096), 24 * course.rank
        os.close(file)
    def step(self, course):
        self._page[self._at : self._at + 24] = struct.pack("qqd", os.getpid(), course.step, time.time())
"""

RANKS_ON_PAGE = 64


@dataclass
class Losses:
    """What the kills of one run have cost.

    Attributes:
        next_s: seconds from each kill to the next step that a rank finished.
        back_s: seconds from each kill until the run was as far as it was before.
        code: the exit code of the run.
    """

    next_s: list[float] = field(default_factory=list)
    back_s: list[float] = field(default_factory=list)
    code: int = 0


def steps(page: mmap.mmap) -> dict[int, tuple[int, float]]:
    """The last step of each process, and when it was finished."""
    found = (struct.unpack_from("qqd", page, 24 * rank) for rank in range(RANKS_ON_PAGE))
    return {pid: (step, at) for pid, step, at in found if pid}


def command(options: argparse.Namespace, ranks: int, strategy: str, policy: str, out: Path) -> list[str]:
    words = [sys.executable, "-m", "tutti", "train", options.model, "--data", options.data, "-n", str(ranks)]
    words += [
        "--epochs",
        str(options.epochs),
        "--strategy",
        strategy,
        "--out",
        str(out),
        "--precision",
        "fp64",
    ]
    words += ["--threads", "1", "--callbacks", f"{out.parent}/progress_of.py:Progress"]
    return words if policy == "stop" else [*words, "--on-failure", policy, "--max-failures", "10000"]


def wait_for(page: mmap.mmap, run: subprocess.Popen[bytes], old: set[int], beyond: int) -> Iterator[float]:
    """Yield when a new process has finished a step, and when one has finished the step `beyond`."""
    told = False
    while run.poll() is None:
        new = {pid: found for pid, found in steps(page).items() if pid not in old}
        if new and not told:
            told = True
            yield min(at for _, at in new.values())
        if any(step >= beyond for step, _ in new.values()):
            yield time.time()
            return
        time.sleep(0.0005)


def disturbed(
    options: argparse.Namespace, ranks: int, strategy: str, policy: str, folder: Path, kills: int
) -> Losses:
    """Train, and kill ranks meanwhile."""
    progress = folder / "progress"
    progress.write_bytes(bytes(4096))
    (folder / "progress_of.py").write_text(CALLBACK)
    with open(progress, "r+b") as file:
        page = mmap.mmap(file.fileno(), 4096)
    environment = {**os.environ, "CHAOS_PROGRESS": str(progress)}
    words = command(options, ranks, strategy, policy, folder / policy)
    run = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    losses, chance = Losses(), random.Random(options.seed)
    while not steps(page) and run.poll() is None:
        time.sleep(0.01)
    for _ in range(kills):
        time.sleep(chance.uniform(0.3, options.pause))
        known = steps(page)
        living = [pid for pid in known if Path(f"/proc/{pid}").exists()]
        if run.poll() is not None or not living:
            break
        victim, furthest = chance.choice(living), max(step for step, _ in known.values())
        began = time.time()
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)
        for at, into in zip(
            wait_for(page, run, set(known), furthest), (losses.next_s, losses.back_s), strict=False
        ):
            into.append(at - began)
    losses.code = run.wait()
    assert run.stderr is not None
    text = run.stderr.read().decode()
    if losses.code:
        print(text, file=sys.stderr)
    return losses


def weights_equal(one: Path, other: Path) -> bool:
    first, second = load_file(one / "weights.safetensors"), load_file(other / "weights.safetensors")
    return first.keys() == second.keys() and all(first[name].equal(second[name]) for name in first)


def rate(folder: Path) -> float:
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return median(line["samples_per_s"] for line in lines)


def undisturbed_rate(options: argparse.Namespace, ranks: int, policy: str) -> float:
    with tempfile.TemporaryDirectory() as name:
        disturbed(options, ranks, "sync", policy, Path(name), 0)
        return rate(Path(name, policy))


def p95(values: list[float]) -> float:
    return sorted(values)[int(0.95 * (len(values) - 1) + 0.5)] if values else float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="lenet")
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--strategies", nargs="+", default=["sync", "hogwild", "easgd", "gossip", "local"])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--pause", type=float, default=2.0, help="the longest time between two kills, in s")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(describe_machine())
    rows = []
    for strategy in options.strategies:
        for ranks in options.ranks:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                same = ""
                for policy in ("respawn", "shrink"):
                    kills = options.kills if policy == "respawn" else ranks - 1
                    found = disturbed(options, ranks, strategy, policy, folder, kills)
                    if policy == "respawn" and strategy == "sync":
                        disturbed(options, ranks, strategy, "stop", folder, 0)
                        same = "yes" if weights_equal(folder / "respawn", folder / "stop") else "NO"
                    rows.append(
                        [
                            strategy,
                            f"{ranks}",
                            policy,
                            f"{len(found.back_s)} of {len(found.next_s)}",
                            f"{found.code}",
                            f"{1000 * median(found.next_s):.0f}" if found.next_s else "",
                            f"{1000 * p95(found.next_s):.0f}" if found.next_s else "",
                            f"{1000 * median(found.back_s):.0f}" if found.back_s else "",
                            f"{1000 * p95(found.back_s):.0f}" if found.back_s else "",
                            same if policy == "respawn" else "",
                        ]
                    )
                    print(*rows[-1], flush=True)
    heads = ["strategy", "ranks", "policy", "survived", "exit code", "next step, ms", "p95"]
    print(table([*heads, "as far as before, ms", "p95", "same weights"], rows))
    ways = {
        policy: lambda policy=policy: undisturbed_rate(options, 2, policy) for policy in ("stop", "respawn")
    }
    found = medians(interleave(ways, options.rounds))
    print(f"nothing fails: {found['respawn'] / found['stop']:.4f} of the samples/s without copies")


if __name__ == "__main__":
    main()
