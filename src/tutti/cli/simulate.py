"""`tutti simulate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import cast

from typing_extensions import override

from tutti.cli.command import Command, writable, write_json
from tutti.cli.options import Parser, Words, numbers_of, words_of
from tutti.errors import BadOption
from tutti.load_object import require_packages
from tutti.records.comparison import WEAK
from tutti.registry import part
from tutti.run.start import run as run_job
from tutti.studies.simulate.machine import BETWEEN, INCLUDED, machine_of
from tutti.studies.simulate.question import DECIDED, SimulateJob, SimulateQuestion, Way
from tutti.studies.simulate.result import Simulation


@part("simulate")
class SimulateCommand(Command):
    """Simulate other hosts: how fast, at what cost, how well?

    Virtual workers in one process run each strategy with real gradients; a virtual clock adds the times of
    steps and messages. With --timing, without gradients, thousands of workers take seconds. Shows speed,
    bytes, cost and accuracy of each strategy and number of workers, and where a strategy stops paying.
    """

    aim = "find the fastest way to train"
    example = (
        "tutti simulate lenet --data mnist --strategies sync,diloco:every=50 --workers 1,8,64 "
        "--network 1gbit,50us --timing"
    )

    @override
    def define(self, parser: Parser) -> None:
        parser.model()
        ways = "ways to train, with commas; options follow colons, as in diloco:every=50:outer_momentum=0.5"
        parser.option("--strategies", ways, "NAMES", "sync,easgd,diloco")
        parser.option("-n, --workers", "numbers of workers, with commas", "NUMBERS", "1,8")
        network = (
            "between hosts: bandwidth, latency and topology, such as 1gbit,100us (default: that of the "
            f"machine, or {BETWEEN})"
        )
        parser.option("--network", network, "WORDS")
        machine = (
            f"the hosts: {', '.join(INCLUDED)}, or a TOML file (default: hosts like this one; the model "
            "is timed)"
        )
        parser.option("--machine", machine, "NAME")
        price = "price of a host for an hour (default: that of the machine)"
        parser.option("--price", price, "X", type=float)
        scaling = "weak: --batch-size is that of each worker; strong: of all workers together"
        parser.option("--scaling", scaling, "KIND", WEAK)
        parser.option("--timing", "simulate the time alone, without gradients")
        parser.option("--calibrate", "TOML file for a machine with the speed measured here", "FILE")
        parser.option("--json", "file for all rows", "FILE")
        parser.option("--figure", "draw speed and accuracy against workers: .svg, .png or .html", "FILE")
        parser.config_options(leave_out=DECIDED)

    @override
    def run(self, words: Words) -> int:
        own = words.own
        machine = machine_of(own.machine, own.network, own.price)
        if own.calibrate is not None and machine.flops_per_s is not None:
            raise BadOption("--calibrate times this machine, and --machine gives its speed; leave one out")
        if own.figure is not None:
            require_packages("a figure needs", ["altair", "vl_convert"], "plots")
        for option in ("calibrate", "json", "figure"):
            if (path := getattr(own, option)) is not None:
                writable(Path(path), f"--{option}")
        question = SimulateQuestion(
            [Way.parse(one) for one in words_of(own.strategies)],
            numbers_of(own.workers, "--workers", "1,8,64"),
            machine,
            own.scaling,
            own.timing,
        )
        found = cast("Simulation", run_job(SimulateJob(words.config(), question, own.calibrate)))
        found.show(sys.stdout)
        write_json(own.json, found.as_json())
        if own.figure is not None:
            found.draw(own.figure)
        return 0
