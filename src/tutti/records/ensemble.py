"""The folder of an ensemble: its members, the combination of their outputs, and their weights.

    ensemble.json           an `EnsembleRecord`
    weights.safetensors     of all members

Needs neither torch nor MPI.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tutti.errors import BadRunFolder
from tutti.records.files import refusing, replace_file
from tutti.records.json_lines import Json, Record, read_record, to_json
from tutti.records.run_folder import WEIGHTS, TrainedOn

ENSEMBLE: Final = "ensemble.json"


@dataclass(frozen=True)
class EnsembleMember(Record):
    """A trained network of an ensemble; a candidate may have several."""

    candidate: str
    config: Json
    data: TrainedOn


@dataclass(frozen=True)
class EnsembleRecord(Record):
    """An ensemble without its parameters."""

    kind: str  # of the values of candidates: "classes", "flags" (both probabilities) or "regression"
    method: str  # the one that determined the weights
    weights: dict[str, float]  # of each candidate's values, the mean of its members'; they add up to 1
    members: tuple[EnsembleMember, ...]  # in the order of their parameters in the file


def read_ensemble(folder: Path) -> EnsembleRecord:
    """Read the record of an ensemble."""
    if not (folder / ENSEMBLE).is_file():
        what = f"has no {ENSEMBLE}" if folder.is_dir() else "does not exist"
        raise BadRunFolder(
            f"{folder} {what}, so it is no ensemble; give a folder that 'tutti ensemble' wrote"
        )
    return read_record(folder / ENSEMBLE, EnsembleRecord)


def write_ensemble(folder: Path, record: EnsembleRecord, weights: bytes) -> None:
    """Write an ensemble."""
    with refusing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / WEIGHTS, weights)
        # Last: without it there is no ensemble.
        replace_file(folder / ENSEMBLE, to_json(record, indent=2).encode() + b"\n")
