"""`tutti resize`."""

from __future__ import annotations

from typing_extensions import override

from tutti.cli.command import Command
from tutti.cli.options import Parser, Words
from tutti.registry import part
from tutti.run.resize import resize


@part("resize")
class ResizeCommand(Command):
    """Change the number of ranks of a run while it trains.

    The run must be on this machine, the first of its --hosts, and survive lost ranks (--on-failure respawn
    or shrink). It copies its state at the next step, and the new ranks continue from there. With strategy
    sync the batch stays the same, and so do the results. If there are more ranks than cores, a warning
    says that they are slower.

    The command waits until the new ranks start; Ctrl-C before that cancels the request. Exit codes: 0 if
    they start, or the run has that number of ranks already; 2 if the run cannot have that number, or does
    not train; 130 after Ctrl-C.
    """

    aim = "train a network"
    example = "tutti resize runs/2026-01-31-120000-lenet-mnist -n 4"

    @override
    def define(self, parser: Parser) -> None:
        parser.add_argument("folder", metavar="RUN", help="its run folder")
        parser.option("-n", "the new number of ranks", "N", type=int, required=True)

    @override
    def run(self, words: Words) -> int:
        folder, workers = words.own.folder, words.own.n
        print(f"{folder}: {resize(folder, workers)}")
        return 0
