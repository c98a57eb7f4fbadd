"""`tutti plan`."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from typing_extensions import override

from tutti.cli.command import Command, writable, write_json
from tutti.cli.options import Parser, Words, command_words, numbers_of, words_of
from tutti.errors import BadOption
from tutti.registry import part
from tutti.run.config import OF_LONG_RUNS, TrainConfig, flag
from tutti.run.start import run as run_job
from tutti.studies.autotune.plan import BUDGET_S, plan
from tutti.studies.simulate.machine import machine_of
from tutti.studies.simulate.question import DECIDED, AdviseJob, SimulateQuestion

if TYPE_CHECKING:
    from tutti.studies.simulate.advice import Advice


@part("plan")
class PlanCommand(Command):
    """Measure which ranks, threads, layout and precision are fastest here.

    Also the batch size, with --batch-sizes. Slow choices are stopped early; bf16 is chosen if its loss
    follows that of fp32 in short trainings. Options that you give are kept. Prints the command to use.
    """

    aim = "find the fastest way to train"
    example = "tutti plan lenet --data mnist --batch-size 128"

    @override
    def define(self, parser: Parser) -> None:
        parser.model()
        budget = "the most time to measure, once the ranks have started"
        parser.option("--budget", budget, "SECONDS", BUDGET_S, type=float)
        parser.option(
            "--precisions",
            "precisions to choose from by their speed alone, with commas, such as fp32,bf16 (default: "
            "--precision, or bf16 if its loss follows that of fp32)",
            "NAMES",
            "",
        )
        sizes = "batch sizes to choose from, with commas, such as 64,128 (default: that of --batch-size)"
        parser.option("--batch-sizes", sizes, "NUMBERS", "")
        parser.option(
            "--exhaustive", "measure every combination until the time is up: stop no slow one early"
        )
        parser.option("--json", "file for all measurements", "FILE")
        hosts = "choose a strategy, local steps and a batch size for this number of hosts, by simulation"
        parser.option("--hosts", hosts, "N", type=int)
        parser.option("--network", "with --hosts: as for 'tutti simulate'", "WORDS")
        parser.option("--machine", "with --hosts: as for 'tutti simulate'", "NAME")
        parallel = ("parallel", "parallel_options", "hosts", "servers", "levels", "server_period")
        left_out = ("validate", *OF_LONG_RUNS, *parallel, "balance", "log", "out")
        parser.config_options(leave_out=left_out)

    @override
    def run(self, words: Words) -> int:
        own, given = words.own, words.given
        for one, several in (("precision", own.precisions), ("batch_size", own.batch_sizes)):
            if one in given and several:
                raise BadOption(f"both {flag(one)} and {flag(one)}s are given; give one of them")
        file = None if own.json is None else writable(Path(own.json), "--json")
        config = words.config()
        if own.hosts is not None:
            return self._advise(words, config, file)
        for option in ("network", "machine"):
            if getattr(own, option) is not None:
                raise BadOption(f"--{option} is for simulated hosts; give their number, such as --hosts 8")
        found = plan(
            config,
            given,
            budget_s=own.budget,
            precisions=words_of(own.precisions),
            batch_sizes=numbers_of(own.batch_sizes, "--batch-sizes", "64,128"),
            exhaustive=own.exhaustive,
        )
        command = shlex.join(["tutti", "train", *command_words(found.pick.candidate.applied_to(config))])
        found.show(sys.stdout)
        print(*found.why(), sep="\n")
        print(f"measured in {found.seconds:.0f} s\n\n{command}", flush=True)
        write_json(file, {**found.as_json(), "command": command})
        return 0

    def _advise(self, words: Words, config: TrainConfig, file: Path | None) -> int:
        """Simulate strategies on the hosts; print the table, the reason, and the command to use."""
        own = words.own
        if "workers" in words.given or own.hosts < 1:
            raise BadOption(
                f"--hosts {own.hosts} fills hosts of a --machine; give at least 1, and leave --workers out"
            )
        decided = [one for one in DECIDED if one in words.given or one in words.dotted]
        decided += [one for one in ("precisions", "exhaustive") if getattr(own, one)]
        if decided:
            raise BadOption(f"{flag(decided[0])} is not for simulated hosts; leave it out, or --hosts")
        machine = machine_of(own.machine, own.network)
        sizes = numbers_of(own.batch_sizes, "--batch-sizes", "64,128")
        question = SimulateQuestion([], [own.hosts * machine.ranks_per_host], machine)
        found = cast("Advice", run_job(AdviseJob(config, question, None, sizes, own.budget)))
        found.simulation.show(sys.stdout)
        whole = replace(found.config, epochs=config.epochs, steps=config.steps, workers="auto", hosts="HOSTS")
        command = shlex.join(["tutti", "train", *command_words(whole)])
        print(f"{found.why()}\n\n{command}", flush=True)
        write_json(file, {**found.simulation.as_json(), "pick": found.pick.way, "command": command})
        return 0
