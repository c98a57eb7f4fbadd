"""`tutti watch`."""

from __future__ import annotations

import sys
from pathlib import Path

from typing_extensions import override

from tutti.cli.command import Command
from tutti.cli.options import Parser, Words
from tutti.errors import BadOption
from tutti.records.farm_folder import FARM
from tutti.registry import part
from tutti.watching.farm import follow_farm
from tutti.watching.follow import follow, show, wait_for
from tutti.watching.health import SILENT_S


@part("watch")
class WatchCommand(Command):
    """Follow a run or a farm: epochs, time left, health of each rank.

    Works from another shell, or another host that sees the folder. Shows the step, samples per second, memory
    and last sign of life of each rank, and names a rank that falls behind, stops or fails. For a farm, such
    as that of 'tutti cv', shows its blocks and jobs. Ends with the run; Ctrl-C does not end the run.
    """

    aim = "see how runs go, and what came out"
    example = "tutti watch runs/2026-01-31-120000-lenet-mnist"

    @override
    def define(self, parser: Parser) -> None:
        parser.add_argument(
            "folder", metavar="RUN", help="the run folder that 'tutti train' writes, or the folder of a farm"
        )
        parser.option(
            "--once", "show how the run is now and end: exit code 0, or 1 if it failed or a rank is lost"
        )
        silent = "name a rank after this time without a heartbeat (one per second), or without a step"
        parser.option("--silent-after", silent, "SECONDS", SILENT_S, type=float)

    @override
    def run(self, words: Words) -> int:
        own = words.own
        if own.silent_after < 2:
            raise BadOption(
                f"--silent-after is {own.silent_after:g}; give at least 2, as heartbeats come each second"
            )
        folder = Path(own.folder)
        if not own.once:
            wait_for(folder, sys.stdout)
        if (folder / FARM).is_file():
            return 0 if follow_farm(folder, sys.stdout, own.once) else 1
        look = show if own.once else follow
        return 0 if look(folder, own.silent_after, sys.stdout) else 1
