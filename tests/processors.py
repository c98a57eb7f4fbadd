"""Runs tests of numbers with the kernels that torch has for other processors than this one.

Usage: python -m tests.processors [TESTS]

A float32 sum is rounded otherwise by each: a test that holds on one of them alone holds by chance. TESTS are
those of `NUMERIC` unless they are given. The exit code is 1 when a test fails on one of them.
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
    "tests/torch_backend/test_collectives.py",
    "tests/torch_backend/test_ecosystem_smoke.py",
    "tests/parameter_server",
    "tests/data/test_parts.py",
    "tests/own_loop/test_distribute.py",
    "tests/run/test_servers.py",
    "tests/studies/test_verify.py",
    "tests/optim",
    "tests/own_loop",
    "tests/model_parallel/test_pipeline.py",
    "tests/model_parallel/test_fsdp.py",
    "tests/model_parallel/test_tensor.py",
    "tests/model_parallel/test_verify.py",
    "tests/allreduce",
    "tests/rules",
    "tests/strategies",
    "tests/test_replica.py",
    "tests/training",
)


def others() -> list[dict[str, str]]:
    """The environment's settings for the processors before this one, whose own are those of every test."""
    names = list(PROCESSORS)
    before = names[: names.index(torch.backends.cpu.get_cpu_capability().lower())]
    return [{"ATEN_CPU_CAPABILITY": name, "ONEDNN_MAX_CPU_ISA": PROCESSORS[name]} for name in before]


def main(tests: Sequence[str]) -> int:
    failed = []
    for settings in others():
        said = " ".join(f"{name}={value}" for name, value in settings.items())
        print(f"=== {said}", flush=True)
        options = ["--numprocesses", "auto", "--dist", "loadfile", "-m", "not mpi and not serial"]
        command = [sys.executable, "-m", "pytest", "-q", *options, *(tests or NUMERIC)]
        if subprocess.run(command, env=os.environ | settings, check=False).returncode:
            failed.append(said)
    for said in failed:
        print(f"FAILED with {said}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
