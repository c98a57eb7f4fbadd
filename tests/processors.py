"""Runs tests of numbers with the kernels that torch has for other processors than this one.

Usage: python -m tests.processors [TESTS]

A float32 sum is rounded otherwise by each: a test that holds on one of them alone holds by chance. TESTS are
those of `NUMERIC` unless they are given. The exit code is 1 when a test fails on one of them.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Sequence

import torch

ATEN = ("default", "avx2", "avx512")
"""The values of ATEN_CPU_CAPABILITY, each of which needs a processor that has those before it too."""

ONEDNN = ("AVX2", "DEFAULT")
"""The values of ONEDNN_MAX_CPU_ISA: DEFAULT is all that the processor has."""

NUMERIC = (
    "tests/algorithms",
    "tests/backend/test_collectives.py",
    "tests/backend/test_ecosystem_smoke.py",
    "tests/centre",
    "tests/data/test_parts.py",
    "tests/experiments/test_own_loop.py",
    "tests/experiments/test_servers.py",
    "tests/experiments/test_verify.py",
    "tests/optim",
    "tests/own_loop",
    "tests/parallel/test_pipeline.py",
    "tests/parallel/test_sharded.py",
    "tests/parallel/test_tensor.py",
    "tests/parallel/test_verify.py",
    "tests/reduction",
    "tests/rules",
    "tests/strategies",
    "tests/test_replica.py",
    "tests/training",
)


def combinations() -> list[dict[str, str]]:
    """The settings of the environment that this processor can run."""
    has = ATEN.index(torch.backends.cpu.get_cpu_capability().lower())
    return [
        {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn}
        for aten, onednn in itertools.product(ATEN[: has + 1], ONEDNN)
    ]


def main(tests: Sequence[str]) -> int:
    failed = []
    for settings in combinations():
        said = " ".join(f"{name}={value}" for name, value in settings.items())
        print(f"=== {said}", flush=True)
        command = [sys.executable, "-m", "pytest", "-q", "-m", "not mpi", *(tests or NUMERIC)]
        if subprocess.run(command, env=os.environ | settings, check=False).returncode:
            failed.append(said)
    for said in failed:
        print(f"FAILED with {said}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
