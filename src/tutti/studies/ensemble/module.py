"""An ensemble as a torch module, which maps stored inputs to outputs like a single network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from tutti.data.parts import Part
from tutti.records.ensemble import EnsembleRecord
from tutti.records.output_kinds import Kind
from tutti.records.preparation import Table, table_of
from tutti.records.run_folder import WEIGHTS
from tutti.run.config import TrainConfig
from tutti.run.trained import PlainModel, Predictor, TrainedModel
from tutti.studies.ensemble.evaluation_job import read_trusted
from tutti.training.weights import load_weights


class Ensemble(Predictor):
    """Several networks as one.

    Inputs are as stored: pixels from 0 to 255, other numbers unchanged. Outputs are logarithms of
    probabilities for classes, logits for labels of 0 or 1, and amounts.

    Args:
        record: its description.
        device: the device to compute on.

    Attributes:
        members: the networks.
    """

    def __init__(self, record: EnsembleRecord, device: str = "cpu") -> None:
        prepared = [one.data.preparation for one in record.members if one.data.preparation is not None]
        table = table_of(prepared) if prepared else None
        super().__init__(record.members[0].data, Kind(record.kind), table)
        self.record = record
        self.members = nn.ModuleList(
            TrainedModel(TrainConfig.from_json(member.config), member.data, device, table=table)
            for member in record.members
        )
        self._candidates = [
            [at for at, one in enumerate(record.members) if one.candidate == name] for name in record.weights
        ]

    @override
    def given(self, part: Part) -> Part:
        return cast("TrainedModel", self.members[0]).given(part)

    @override
    def take_rows_of(self, table: Table) -> None:
        super().take_rows_of(table)
        for member in self.members:
            cast("TrainedModel", member).take_rows_of(table)

    @override
    def forward(self, *stored: Tensor, **named: Tensor) -> Tensor:
        """Return the outputs of the ensemble, in the precision of its members."""
        return self.of_outputs([cast("Tensor", member(*stored, **named)) for member in self.members])

    def of_outputs(self, outputs: Sequence[Tensor]) -> Tensor:
        """Return the outputs of the ensemble from the outputs of its members."""
        values = [
            torch.stack([_values(self.kind, outputs[at]) for at in own]).mean(0) for own in self._candidates
        ]
        return combined([*self.record.weights.values()], self.kind, values).to(outputs[0].dtype)

    @override
    def plain(self) -> PlainModel:
        return _PlainEnsemble(self).eval()


class _PlainEnsemble(PlainModel):
    def __init__(self, ensemble: Ensemble) -> None:
        super().__init__(ensemble.data, ensemble.table)
        self._members = nn.ModuleList(cast("TrainedModel", member).plain() for member in ensemble.members)
        self._of_outputs = ensemble.of_outputs

    @override
    def forward(self, stored: Tensor) -> Tensor:
        return self._of_outputs([member(stored) for member in self._members])


def combined(weights: Sequence[float], kind: Kind, values: Sequence[Tensor]) -> Tensor:
    """Return the outputs whose values are the weighted sum of the candidates' values."""
    mixed = sum(value * weight for value, weight in zip(values, weights, strict=True))
    assert isinstance(mixed, Tensor)
    if kind is Kind.REGRESSION:
        return mixed
    least = torch.finfo(torch.float64).tiny
    return mixed.clamp(min=least).log() if kind is Kind.CLASSES else mixed.logit(eps=1e-16)


def _values(kind: Kind, outputs: Tensor) -> Tensor:
    wide = outputs.double()
    if kind is Kind.CLASSES:
        return wide.softmax(1)
    return wide.sigmoid() if kind is Kind.FLAGS else wide


def load_ensemble(folder: str | Path, trust: bool = False, device: str = "cpu") -> Ensemble:
    """Load an ensemble that 'tutti ensemble' wrote, in evaluation mode.

    Args:
        folder: of the ensemble.
        trust: run the code that the ensemble names.
        device: the device to compute on.

    Raises:
        BadRunFolder: there is no ensemble, or it is damaged.
        Untrusted: it names code, and no run of this user has written it.
    """
    folder = Path(folder)
    record = read_trusted(folder, trust)
    ensemble = Ensemble(record, device)
    load_weights(ensemble, folder / WEIGHTS)
    return ensemble.eval()
