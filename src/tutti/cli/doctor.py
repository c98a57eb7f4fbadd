"""`tutti doctor`."""

from __future__ import annotations

from typing_extensions import override

from tutti.cli.command import Command
from tutti.cli.options import Parser, Words
from tutti.registry import part
from tutti.studies.doctor import examine
from tutti.studies.mpi_doctor import WRONG, examine_ranks


@part("doctor")
class DoctorCommand(Command):
    """Show what this machine has, and what to run on it.

    Shows cores, affinity, quota, threads, memory, matrix units, torch, MPI and GPU, and measures an
    all-reduce between two ranks. With --mpi, checks the ranks that mpirun or srun has started.
    """

    aim = "look at the data and this machine"
    example = "tutti doctor"

    @override
    def define(self, parser: Parser) -> None:
        parser.option(
            "--mpi",
            "under mpirun or srun: show the MPI library, host, CPUs and networks of each rank, and any "
            "problem; the exit code is 1 if there is one",
        )

    @override
    def run(self, words: Words) -> int:
        findings = examine_ranks() if words.own.mpi else examine()
        width = max((len(name) for name, _ in findings), default=0)
        for name, value in findings:
            print(f"{name:<{width}}  {value}")
        return int(any(name == WRONG for name, _ in findings))
