"""The folder of an ensemble: what its members are, how their outputs are combined, and their weights.

    ensemble.json           an `EnsembleRecord`
    config.seal             proof that this user has written it, if it names code: `tutti.run.trust`
    weights.safetensors     of all members

Needs neither torch nor MPI.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from typing_extensions import override

from tutti.errors import BadRunFolder
from tutti.records.files import refusing, replace_file
from tutti.records.json_lines import Json, Record, read_record, to_json
from tutti.records.run_folder import SEAL, WEIGHTS, TrainedOn

ENSEMBLE: Final = "ensemble.json"

VERSION: Final = 1
"""The version of the file that this program writes."""


@dataclass(frozen=True)
class Combination(Record):
    """The way from the values of candidates to those of their ensemble.

    A value is a probability, or an amount.

    Attributes:
        method: by which it was found.
        candidates: their names.
        weights: of each; they add up to 1. Empty where there are coefficients instead.
        coefficients: of shape (numbers, candidates x numbers), of a linear model of all values side by side;
            for classes, softmax makes probabilities of what it gives.
        intercepts: likewise.
    """

    method: str
    candidates: tuple[str, ...]
    weights: tuple[float, ...]
    coefficients: tuple[tuple[float, ...], ...] = ()
    intercepts: tuple[float, ...] = ()

    @override
    def check(self) -> None:
        """Raise ValueError if the numbers are not those of these candidates."""
        count = len(self.candidates)
        numbers = [*self.weights, *self.intercepts, *(x for line in self.coefficients for x in line)]
        if not count or not all(map(math.isfinite, numbers)):
            raise ValueError("a combination needs candidates and finite numbers")
        if self.weights:
            fits = len(self.weights) == count and not self.coefficients and min(self.weights) >= 0
            if not fits or not math.isclose(sum(self.weights), 1, rel_tol=1e-9):
                raise ValueError("the weights are not one for each candidate, adding up to 1")
            return
        lengths = {len(line) for line in self.coefficients}
        if len(self.intercepts) != len(self.coefficients) or lengths != {count * len(self.intercepts)}:
            raise ValueError("the coefficients are not those of these candidates")


@dataclass(frozen=True)
class Member(Record):
    """A trained network of an ensemble.

    Attributes:
        candidate: the name of the candidate that it is of; several may be of one.
        config: the configuration that it was trained with, as JSON values.
        data: the data that it was trained on, as it saw them.
    """

    candidate: str
    config: Json
    data: TrainedOn


@dataclass(frozen=True)
class EnsembleRecord(Record):
    """An ensemble, all but its weights.

    Attributes:
        kind: of the values: "classes", "flags" or "amounts".
        combination: of the values of candidates, each the mean of its members' values.
        members: in the order of their weights.
        version: of the file.
    """

    kind: str
    combination: Combination
    members: tuple[Member, ...]
    version: int = VERSION

    @override
    def check(self) -> None:
        """Raise ValueError if the members are not those of the combination."""
        if {one.candidate for one in self.members} != set(self.combination.candidates):
            raise ValueError("the members are of other candidates than the combination")
        if self.version != VERSION:
            raise ValueError(f"it is of version {self.version}, and this tutti reads version {VERSION}")

    @property
    def configs(self) -> Json:
        """The configurations of all members, as a seal is made of them."""
        return {"members": [one.config for one in self.members]}


def read_ensemble(folder: Path) -> EnsembleRecord:
    """Read the record of an ensemble.

    Raises:
        BadRunFolder: the folder has none, or it is damaged.
    """
    if not (folder / ENSEMBLE).is_file():
        what = f"has no {ENSEMBLE}" if folder.is_dir() else "does not exist"
        raise BadRunFolder(
            f"{folder} {what}, so it is no ensemble; give a folder that 'tutti ensemble' wrote"
        )
    return read_record(folder / ENSEMBLE, EnsembleRecord)


def write_ensemble(folder: Path, record: EnsembleRecord, weights: bytes, seal: str | None) -> None:
    """Write an ensemble.

    Args:
        folder: of the ensemble.
        record: all but its weights.
        weights: of all members, as a file of safetensors.
        seal: the proof that this user has written the configurations.

    Raises:
        BadRunFolder: it cannot be written.
    """
    with refusing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        replace_file(folder / WEIGHTS, weights)
        if seal is not None:
            replace_file(folder / SEAL, seal.encode() + b"\n")
        # Last: without it there is no ensemble.
        replace_file(folder / ENSEMBLE, to_json(record, indent=2).encode() + b"\n")
