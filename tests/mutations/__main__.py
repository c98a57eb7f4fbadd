"""Breaks the code in small ways, and lists those that no test notices.

Usage: python -m tests.mutations [--sample N] [--seed N] [--test PATH ...] [FILE ...]

FILES are those of `TESTS` unless they are given. Of their mutants, N are drawn, or all without --sample.
Each --test is a file or folder of tests to run in place of those that `TESTS` has for the files.
What cannot be noticed, because the program does the same, is listed with its reason in equivalent.txt.

Prints the survivors as FILE:LINE FUNCTION: BEFORE -> AFTER. The exit code is 1 when fewer than 90 % of a
part's are noticed.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import pytest

from tests.mutations.operators import Mutant, mutants
from tests.mutations.session import HUNG, NOTICED, Session, Target

ROOT: Final = Path(__file__).parents[2]
SOURCE: Final = ROOT / "src"
WANTED: Final = 0.9
"""The share of mutants that tests notice."""

OWN_LOOPS: Final = (
    *(f"own_loop/test_{name}.py" for name in ("figures", "loops", "settling", "sums")),
    *(f"own_loop/test_distribute{name}.py" for name in ("", "_agreement", "_paces")),
)
"""The tests of the code behind a user's own loop."""

GOING_ON: Final = ("own_loop/test_checkpoints.py", "own_loop/test_saving.py")
"""The tests of its checkpoints."""

TESTS: Final = {
    "allreduce": ("allreduce", "strategies/test_sync_options.py"),
    "parameter_server": (
        "parameter_server",
        *(f"own_loop/test_strategies_of_{how}.py" for how in ("one", "several")),
        *(f"strategies/test_{name}.py" for name in ("downpour", "easgd", "lazy", "paramserver")),
    ),
    "strategies": (
        "strategies",
        "optim/test_missing.py",
        "reports/test_advice.py",
        "training/test_timers.py",
        "own_loop/test_strategies_of_one.py",
    ),
    "own_loop/divided_optimizer.py": ("strategies/test_divided.py", *OWN_LOOPS, *GOING_ON),
    "strategies/joint_gradients.py": (
        "strategies/test_joint_gradients.py",
        *OWN_LOOPS,
        "own_loop/test_loading.py",
    ),
    "own_loop/checkpoints.py": (*GOING_ON, "own_loop/test_distribute.py", "own_loop/test_ways_apart.py"),
    "own_loop/distribute.py": (
        *OWN_LOOPS,
        *GOING_ON,
        "own_loop/test_loading.py",
        "own_loop/test_other_samples.py",
        "own_loop/test_strategies_of_several.py",
        "own_loop/test_ways_apart.py",
    ),
    "own_loop/gradient_exchange.py": (*OWN_LOOPS, "own_loop/test_loading.py"),
    "own_loop/sums.py": OWN_LOOPS,
    "own_loop/places.py": GOING_ON,
    "own_loop/steppers.py": (
        *OWN_LOOPS,
        *GOING_ON,
        *(f"own_loop/test_strategies_of_{how}.py" for how in ("one", "several")),
    ),
    "own_loop/structure.py": (*OWN_LOOPS, "own_loop/test_other_samples.py"),
    "own_loop/fingerprints.py": ("own_loop/test_other_samples.py",),
    "own_loop/meetings.py": (*OWN_LOOPS, "own_loop/test_ways_apart.py"),
    "own_loop/loop.py": (
        *OWN_LOOPS,
        *GOING_ON,
        "own_loop/test_strategies_of_several.py",
        "own_loop/test_ways_apart.py",
    ),
    "own_loop/shard.py": (
        *OWN_LOOPS,
        *GOING_ON,
        "own_loop/test_strategies_of_several.py",
        "own_loop/test_ways_apart.py",
    ),
    "optim": ("optim", "strategies/test_sync.py", "strategies/test_divided.py"),
    "replica.py": ("test_replica.py",),
    "data/batches.py": (
        *(f"data/test_{name}.py" for name in ("batches", "dealing", "position", "sampling")),
        *(f"data/streaming/test_{name}.py" for name in ("streaming", "training")),
        *(f"training/test_{name}.py" for name in ("augmentations", "resuming", "stopping")),
    ),
}
"""The tests of each part, which is a folder or file of the package: its own, and those of what is nothing
without it. A file that is a part of its own is in no other.
"""


def equivalents() -> dict[tuple[str, str, str], str]:
    """Why a mutant does the same, by file, function and change."""
    found = {}
    for line in Path(__file__).with_name("equivalent.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            file, function, change, reason = (part.strip() for part in line.split(" | "))
            found[file, function, change] = reason
    return found


def files(given: Sequence[str]) -> list[Path]:
    """The modules to break."""
    package = SOURCE / "tutti"
    places = [Path(one).resolve() for one in given] or [package / name for name in TESTS]
    found = [
        file for place in places for file in (sorted(place.rglob("*.py")) if place.is_dir() else [place])
    ]
    return [file for file in dict.fromkeys(found) if file.name != "__init__.py"]


def part_of(file: Path) -> str:
    """The key of `TESTS` that a module belongs to; "" where there is none."""
    name = str(file.relative_to(SOURCE / "tutti"))
    return max((key for key in TESTS if name == key or name.startswith(key + "/")), key=len, default="")


def tests_of(given: Iterable[Path]) -> list[str]:
    """The files and folders of tests for the modules."""
    keys = {part_of(file) for file in given} - {""}
    return sorted({str(ROOT / "tests" / one) for key in keys for one in TESTS[key]})


def targets(given: Sequence[Path], sample: int | None, seed: int) -> list[Target]:
    """The modules, each with those of its mutants that were drawn."""
    explained = equivalents()
    every: list[tuple[Path, Mutant]] = []
    for file in given:
        name = str(file.relative_to(SOURCE / "tutti"))
        found = mutants(file.read_text())
        every += [(file, one) for one in found if (name, one.function, one.change) not in explained]
    if sample is not None and sample < len(every):
        drawn = sorted(random.Random(seed).sample(range(len(every)), sample))
        every = [every[at] for at in drawn]
    made = []
    for file in given:
        module = ".".join(file.relative_to(SOURCE).with_suffix("").parts)
        chosen = [mutant for where, mutant in every if where == file]
        if chosen:
            made.append(Target(module, str(file.relative_to(ROOT)), file.read_text(), chosen))
    return made


def main(words: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutations")
    parser.add_argument("--sample", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--test", action="append", dest="tests")
    parser.add_argument("files", nargs="*")
    options = parser.parse_args(words)
    os.chdir(ROOT)
    chosen = files(options.files)
    session = Session(targets(chosen, options.sample, options.seed), os.cpu_count() or 1)
    pytest.main(
        [
            "-qq",
            "-s",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:faulthandler",
            "-m",
            "not mpi",
            *(options.tests or tests_of(chosen)),
        ],
        plugins=[session],
    )
    return report(session)


def report(session: Session) -> int:
    """Print what survived, and the share that was noticed of each part; the exit code."""
    for failed in session.dropped:
        print(f"left out, for it fails without a mutant: {failed}")
    for target, mutant, what in sorted(session.found, key=lambda one: (one[0].path, one[1].line)):
        if what not in (NOTICED, HUNG):
            print(f"{what}: {target.path}:{mutant.line} {mutant.function}: {mutant.change}")
    _report_equivalents([ROOT / target.path for target in session.targets])
    counts: dict[str, Counter[str]] = {}
    for target, _, what in session.found:
        counts.setdefault(part_of(ROOT / target.path), Counter())[what] += 1
    short = not counts
    for part, count in sorted(counts.items()):
        noticed, total = count[NOTICED] + count[HUNG], count.total()
        short = short or noticed < WANTED * total
        others = ", ".join(f"{number} {what}" for what, number in sorted(count.items()) if what != NOTICED)
        print(f"{part}: {noticed} of {total} noticed" + (f" ({others})" if others else ""))
    return int(short)


def _report_equivalents(given: Sequence[Path]) -> None:
    places = Counter(
        (str(file.relative_to(SOURCE / "tutti")), one.function, one.change)
        for file in given
        for one in mutants(file.read_text())
    )
    files = {file for file, *_ in places}
    print("change nothing that a test could see:")
    for key, reason in equivalents().items():
        if key[0] in files:
            file, function, change = key
            many = "" if places[key] == 1 else f" ({places[key]} such places)"
            print(f"  {file} {function}: {change}: {reason}{many}")
    print()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
