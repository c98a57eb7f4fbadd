"""Runs tests of numbers with the kernels that torch has for other processors than this one.

Usage: python -m tests.processors [--quick | TESTS]

A float32 sum is rounded otherwise by each: a test that holds on one of them alone holds by chance. TESTS are
those of `NUMERIC` unless they are given, and those of `QUICK` with --quick. The exit code is 1 when a test
fails on one of them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import torch

PROCESSORS = {"default": "SSE41", "avx2": "AVX2", "avx512": "DEFAULT"}
"""The values of ATEN_CPU_CAPABILITY, each of which needs a processor that has those before it too.

With each comes the ONEDNN_MAX_CPU_ISA of such a processor; DEFAULT is all that this one has.
"""

NUMERIC = (
    "tests/allreduce",
    "tests/data/test_parts.py",
    "tests/model_parallel/test_fsdp.py",
    "tests/model_parallel/test_pipeline.py",
    "tests/model_parallel/test_tensor.py",
    "tests/model_parallel/test_verify.py",
    "tests/optim",
    "tests/own_loop",
    "tests/parameter_server",
    "tests/run/test_servers.py",
    "tests/strategies",
    "tests/studies/test_verify.py",
    "tests/test_replica.py",
    "tests/torch_backend/test_collectives.py",
    "tests/torch_backend/test_ecosystem_smoke.py",
    "tests/training",
)

QUICK = (
    "tests/allreduce",
    "tests/model_parallel/test_tensor.py",
    "tests/parameter_server/test_staleness.py",
    "tests/strategies/test_elastic_averaging.py",
    "tests/strategies/test_energy_matching.py",
    "tests/strategies/test_mixing.py",
    "tests/strategies/test_sums.py",
    "tests/strategies/test_worth_sending.py",
)
"""The formulas, each in seconds."""


def others() -> list[dict[str, str]]:
    """The environment's settings for the processors before this one, whose own are those of every test."""
    names = list(PROCESSORS)
    before = names[: names.index(torch.backends.cpu.get_cpu_capability().lower())]
    return [{"ATEN_CPU_CAPABILITY": name, "ONEDNN_MAX_CPU_ISA": PROCESSORS[name]} for name in before]


def main(tests: Sequence[str]) -> int:
    chosen = QUICK if list(tests) == ["--quick"] else tests or NUMERIC
    failed = []
    for settings in others():
        said = " ".join(f"{name}={value}" for name, value in settings.items())
        print(f"=== {said}", flush=True)
        options = ["--numprocesses", "auto", "--dist", "loadfile", "-m", "not mpi and not serial"]
        command = [sys.executable, "-m", "pytest", "-q", *options, *chosen]
        if subprocess.run(command, env=os.environ | settings, check=False).returncode:
            failed.append(said)
    for said in failed:
        print(f"FAILED with {said}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
