"""`tutti doctor`."""

from __future__ import annotations

import argparse
from typing import Any

from typing_extensions import override

from tutti.cli.command import Command
from tutti.registry import part
from tutti.run.config import Options
from tutti.studies.doctor import examine


@part("doctor")
class DoctorCommand(Command):
    """Tell what this machine has, and what to run on it.

    Its cores, affinity, quota, threads, memory, matrix units, torch, MPI and whether it has ULFM,
    GPU; and, measured, an all-reduce between two ranks.
    """

    aim = "look at the data and this machine"
    example = "tutti doctor"

    @override
    def run(self, own: argparse.Namespace, given: dict[str, Any], dotted: dict[str, Options]) -> int:
        findings = examine()
        width = max(len(name) for name, _ in findings)
        for name, value in findings:
            print(f"{name:<{width}}  {value}")
        return 0
