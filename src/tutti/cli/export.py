"""`tutti export`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Final

from typing_extensions import override

from tutti.cli.command import Command
from tutti.cli.options import Parser, Words
from tutti.errors import BadOption, UnknownName
from tutti.exports import FORMS
from tutti.exports.programs import PROGRAMS, require_program
from tutti.records.ensemble import ENSEMBLE
from tutti.records.files import refusing
from tutti.records.preparation import TEXT, TableColumn
from tutti.records.run_folder import RunFolder, TrainedOn
from tutti.registry import part


@part("export")
class ExportCommand(Command):
    """Write the model of a run for other programs, or its weights alone.

    Writes the weights, with the optimizer's state of a checkpoint if the form can hold it; or a whole program
    (onnx, torch-export), whose outputs are compared with those of the model.
    """

    aim = "use a trained network"
    example = "tutti export runs/2026-01-31-120000-lenet-mnist/checkpoints/latest --to dcp"

    @override
    def define(self, parser: Parser) -> None:
        of = "a run folder, one of its checkpoints, or a file of another program in one of the forms"
        parser.add_argument("place", metavar="PLACE", help=of)
        parser.add_argument("--to", required=True, metavar="FORM", help=_forms())
        parser.trust_option()
        parser.option("-o, --out", "the file or folder to write (default: the name of PLACE, here)", "PLACE")

    @override
    def run(self, words: Words) -> int:
        own = words.own
        if own.to not in (known := [*FORMS, *PROGRAMS]):
            raise UnknownName("form", own.to, known)
        require_program(own.to)
        from tutti.exports.sources import read_from

        place, suffix = Path(own.place), (FORMS if own.to in FORMS else PROGRAMS)[own.to].suffix
        out = Path(own.out) if own.out else Path(_name(place) + suffix)
        if out.exists():
            raise BadOption(f"{out} exists already; name another place with --out, or delete it")
        if own.to in PROGRAMS:
            _write_program(place, own.to, out, own.trust)
            return 0
        form = FORMS[own.to]
        content = read_from(place)
        for note in content.notes:
            print(f"tutti: warning: {note}", file=sys.stderr, flush=True)
        with refusing(out):
            out.parent.mkdir(parents=True, exist_ok=True)
            form.write(out, content)
        kept = form.with_optimizer and content.optimizer is not None
        print(f"{out}: {len(content.weights)} tensors{' and the state of the optimizer' if kept else ''}")
        data = RunFolder(place).find(TrainedOn)
        if data is not None and data.mean:
            mean, std = (", ".join(f"{one:.6g}" for one in numbers) for numbers in (data.mean, data.std))
            print(f"the model takes scaled inputs: (x / 255 - mean) / std, with mean {mean} and std {std}")
        elif data is not None and data.preparation is not None:
            print("the model takes prepared inputs; a program, as by --to onnx, prepares them itself")
        return 0


def _write_program(place: Path, name: str, out: Path, trust: bool) -> None:
    """Write the model of a run or an ensemble as a program, and print its inputs and outputs."""
    from tutti.exports.programs.base import write_program
    from tutti.run.trained import TrainedModel, load
    from tutti.studies.ensemble.module import load_ensemble

    program = PROGRAMS[name]
    model = load_ensemble(place, trust) if (place / ENSEMBLE).is_file() else load(place, trust=trust)
    data, kind = model.data, model.kind.value
    facts = {"labels": json.dumps(model.labels), "kind": kind, "trained_on": data.name}
    if model.table is not None:
        facts["columns"] = json.dumps([_described(column) for column in model.table.columns])
    with refusing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
        module = model.plain()
        off = write_program(out, program, module, facts)
    shape = " x ".join(map(str, program.input_shape(module, module.shape)))
    bits = " in float32" if isinstance(model, TrainedModel) and model.precision == "bf16" else ""
    print(
        f"{out}: takes {data.dtype or 'inputs'} as stored, of shape samples x {shape}, and gives "
        f"{MEANINGS[kind]}; its outputs are those of the model{bits}, to {off:.1g}"
    )
    if model.table is not None:
        print("the columns, and the texts with the numbers 0, 1, ..., are in its metadata, as 'columns'")


def _described(column: TableColumn) -> dict[str, Any]:
    """Describe a column for callers of a program; unknown texts have the number after `texts`."""
    texts = {"texts": column.texts[:-1]} if column.kind == TEXT else {}
    return {"name": column.name, "kind": column.kind, **texts}


MEANINGS: Final = {
    "classes": "a score for each class, for softmax",
    "flags": "a logit for each label",
    "regression": "the predicted numbers",
}
"""The outputs of models by kind, in words."""


def _name(place: Path) -> str:
    """Return the name of the exported file or folder, without the ending of a form."""
    name = place.resolve().name
    return next((name.removesuffix(one.suffix) for one in FORMS.values() if name.endswith(one.suffix)), name)


def _forms() -> str:
    lines = [f"{name}: {kinds.summary(name).rstrip('.')}" for kinds in (FORMS, PROGRAMS) for name in kinds]
    return "; ".join(lines)
