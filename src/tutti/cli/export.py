"""`tutti export`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from typing_extensions import override

from tutti.cli.command import Command
from tutti.cli.options import Parser
from tutti.errors import BadOption
from tutti.exports import FORMS
from tutti.records.files import refusing
from tutti.registry import part
from tutti.run.config import Options


@part("export")
class ExportCommand(Command):
    """Write the weights of a run for another program, or those of another program anew.

    Of a checkpoint the optimizer's state too, where the form has room for it.
    """

    example = "tutti export runs/2026-01-31-120000-lenet-mnist/checkpoints/latest --to dcp"

    @override
    def define(self, parser: Parser) -> None:
        of = "a run folder, one of its checkpoints, or what another program has written in one of the forms"
        parser.add_argument("place", metavar="PLACE", help=of)
        parser.add_argument("--to", required=True, metavar="FORM", help=_forms())
        parser.option("--out", "the file or folder to write (default: the name of PLACE, here)", "PLACE")

    @override
    def run(self, own: argparse.Namespace, given: dict[str, Any], dotted: dict[str, Options]) -> int:
        FORMS.check(own.to)
        from tutti.exports.sources import read_from

        form, place = FORMS[own.to], Path(own.place)
        out = Path(own.out) if own.out else Path(_name(place) + form.suffix)
        if out.exists():
            raise BadOption(f"{out} is there already; name another place with --out, or delete it")
        content = read_from(place)
        for note in content.notes:
            print(f"tutti: warning: {note}", file=sys.stderr, flush=True)
        with refusing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            form.write(out, content)
        kept = form.with_optimizer and content.optimizer is not None
        print(f"{out}: {len(content.weights)} tensors{' and the state of the optimizer' if kept else ''}")
        return 0


def _name(place: Path) -> str:
    """Return the name of what is exported, without the ending that one of the forms has given it."""
    name = place.resolve().name
    return next((name.removesuffix(one.suffix) for one in FORMS.values() if name.endswith(one.suffix)), name)


def _forms() -> str:
    return "; ".join(f"{name}: {FORMS.summary(name).rstrip('.')}" for name in FORMS)
