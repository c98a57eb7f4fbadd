"""How soon training begins: from the command to the first step at 2 ranks, beside `python -c "import torch"`.

    python benchmarks/start.py [--rounds 5]
    python benchmarks/start.py --imports        of tutti, beside what Python has

Wanted: at most the import of torch plus 2 s, and 0.1 s for `import tutti`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from measure import describe_machine, interleave, medians, table

LOSS = """
import os, time
from torch.nn.functional import cross_entropy

def loss(outputs, targets):
    try:
        with open(os.environ["FIRST_STEP"], "x") as file:
            file.write(repr(time.time()))
    except FileExistsError:
        pass
    return cross_entropy(outputs, targets)
"""


def importing_torch() -> float:
    began = time.time()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.time() - began


def first_step(ranks: int) -> float:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "timed.py").write_text(LOSS)
        stamp = Path(folder, "stamp")
        command = [
            sys.executable,
            "-m",
            "tutti.cli.main",
            "train",
            "mlp",
            "--data",
            "digits",
            "-n",
            str(ranks),
        ]
        command += ["--steps", "1", "--loss", f"{folder}/timed.py:loss", "--out", f"{folder}/run"]
        began = time.time()
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, "FIRST_STEP": str(stamp)})
        return float(stamp.read_text()) - began


def importing(name: str) -> float:
    """CPU seconds of an import in a fresh Python: other programs delay it, and this counts less of that."""
    code = f"import time; begin = time.process_time(); import {name}; print(time.process_time() - begin)"
    return float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout)


def print_imports(rounds: int) -> None:
    """Print what it takes to import tutti, and well-known parts of Python's library."""
    names = ("tutti", "asyncio", "http.client")
    taken = medians(interleave({name: partial(importing, name) for name in names}, rounds=rounds))
    print(describe_machine())
    print(f"median of {rounds}\n")
    print(
        table(["import", "ms of a core"], [[name, f"{1e3 * seconds:.0f}"] for name, seconds in taken.items()])
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each side")
    parser.add_argument("--imports", action="store_true", help="measure 'import tutti' alone")
    args = parser.parse_args()
    if args.imports:
        print_imports(args.rounds)
        return
    sides = {
        "python -c 'import torch'": importing_torch,
        "first step, 1 rank": lambda: first_step(1),
        "first step, 2 ranks": lambda: first_step(2),
    }
    seconds = medians(interleave(sides, rounds=args.rounds))
    torch_s = seconds["python -c 'import torch'"]
    print(describe_machine())
    print(f"seconds from the command on, median of {args.rounds}\n")
    rows = [[name, f"{took:.2f}", f"{took - torch_s:+.2f}"] for name, took in seconds.items()]
    print(table(["", "seconds", "beyond importing torch"], rows))


if __name__ == "__main__":
    main()
