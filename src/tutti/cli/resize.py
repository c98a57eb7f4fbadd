"""`tutti resize`."""

from __future__ import annotations

import argparse
from typing import Any

from typing_extensions import override

from tutti.cli.command import Command
from tutti.cli.options import Parser
from tutti.registry import part
from tutti.run.config import Options
from tutti.run.resize import resize


@part("resize")
class ResizeCommand(Command):
    """Have a run go on with more or fewer ranks, while it trains.

    The run has to be on this machine, and to survive lost ranks (--on-failure respawn or shrink). It
    trains on until the new ranks are ready, which then take over its last copy of the state. With
    strategy sync the batch stays the same, and so does what is learned. Ctrl-C takes the wish back.
    """

    aim = "train a network"
    example = "tutti resize runs/2026-01-31-120000-lenet-mnist -n 4"

    @override
    def define(self, parser: Parser) -> None:
        parser.add_argument("folder", metavar="RUN", help="its run folder")
        parser.option("-n", "how many ranks are to train from here on", "N", type=int, required=True)

    @override
    def run(self, own: argparse.Namespace, given: dict[str, Any], dotted: dict[str, Options]) -> int:
        print(resize(own.folder, own.n))
        return 0
