"""`tutti doctor`."""

from __future__ import annotations

import argparse

from tutti.cli.command import Command
from tutti.cli.options import Parser
from tutti.registry import part
from tutti.run.config import Options
from tutti.studies.doctor import examine


def define(parser: Parser) -> None:
    """It has no options."""


def run(arguments: argparse.Namespace, dotted: dict[str, Options]) -> int:
    """Print the findings, one on each line."""
    findings = examine()
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        print(f"{finding.name:<{width}}  {finding.value}")
    return 0


@part("doctor")
def command() -> Command:
    """Tell what this machine has, and what to run on it."""
    return Command(
        name="doctor",
        about="Tell what this machine has: cores, affinity, quota, threads, memory, matrix units, torch,\n"
        "MPI and whether it has ULFM, GPU; measure an all-reduce between two ranks; and recommend\n"
        "what to run.",
        example="tutti doctor",
        define=define,
        run=run,
        dotted=(),
    )
