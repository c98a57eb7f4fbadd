"""An ensemble as a module of torch: stored inputs in, the outputs of one network out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from typing_extensions import override

from tutti import models
from tutti.data.parts import Scale
from tutti.records.ensemble import Combination, EnsembleRecord, Member
from tutti.records.run_folder import WEIGHTS
from tutti.run.build import seeded
from tutti.run.config import TrainConfig
from tutti.run.jobs import Job
from tutti.run.pickled_arguments import named_or_given
from tutti.studies.ensemble.evaluation_job import read_trusted
from tutti.studies.ensemble.library import Kind
from tutti.training.precision import Arithmetic
from tutti.training.weights import load_weights


class Network(nn.Module):
    """A member of an ensemble, which scales inputs itself, as those that it was trained on.

    Args:
        member: what it is.
        device: where it computes.
    """

    def __init__(self, member: Member, device: str = "cpu") -> None:
        super().__init__()
        config, data = TrainConfig.from_json(member.config), member.data
        self._scale = Scale(data.mean, data.std, data.fill)
        self._arithmetic = Arithmetic(config.precision, config.layout, device)
        with seeded(config.seed):
            model = models.build(
                named_or_given(Job(config), "model"), data.shape, data.outputs, config.model_options
            )
        self.model = self._arithmetic.prepare(model)
        if any(map(is_lazy, chain(model.parameters(), model.buffers()))):
            # Lazy modules have their shapes, which weights must have, after a first input.
            with torch.no_grad():
                self.eval()(torch.zeros(1, *data.shape, device=device))

    @override
    def forward(self, stored: Tensor) -> Tensor:
        """Return the outputs of the network."""
        inputs = self._scale.on(str(stored.device)).apply(stored)
        return self._arithmetic.forward(self.model, self._arithmetic.inputs(inputs))


class Ensemble(nn.Module):
    """Several networks as one.

    Its inputs are as they are stored: pixels from 0 to 255, other numbers as they are. It gives logarithms of
    probabilities for classes, logits for labels of 0 or 1, and amounts.

    Args:
        record: what it is.
        device: where it computes.

    Attributes:
        members: the networks.
    """

    def __init__(self, record: EnsembleRecord, device: str = "cpu") -> None:
        super().__init__()
        self.record, self._kind = record, Kind(record.kind)
        self.members = nn.ModuleList(Network(member, device) for member in record.members)
        self._candidates = [
            [at for at, one in enumerate(record.members) if one.candidate == name]
            for name in record.combination.candidates
        ]

    @override
    def forward(self, stored: Tensor) -> Tensor:
        """Return the outputs of the ensemble, in the precision of its members."""
        outputs = [cast("Tensor", member(stored)) for member in self.members]
        values = [
            torch.stack([_values(self._kind, outputs[at]) for at in own]).mean(0) for own in self._candidates
        ]
        return combined(self.record.combination, self._kind, values).to(outputs[0].dtype)


def combined(found: Combination, kind: Kind, values: Sequence[Tensor]) -> Tensor:
    """Return the outputs that mean the combination of the candidates' values."""
    if found.weights:
        mixed = sum(value * weight for value, weight in zip(values, found.weights, strict=True))
        assert isinstance(mixed, Tensor)
        if kind is Kind.AMOUNTS:
            return mixed
        least = torch.finfo(torch.float64).tiny
        return mixed.clamp(min=least).log() if kind is Kind.CLASSES else mixed.logit(eps=1e-16)
    # The classes last, and what is before them as samples.
    shape = values[0].shape
    if kind is Kind.CLASSES:
        values = [value.movedim(1, -1) for value in values]
        features = torch.cat(list(values), -1)
    else:
        features = torch.cat([value.flatten(1) for value in values], 1)
    coefficients, intercepts = (
        torch.tensor(numbers, dtype=torch.float64, device=features.device)
        for numbers in (found.coefficients, found.intercepts)
    )
    line = features @ coefficients.T + intercepts
    return line.log_softmax(-1).movedim(-1, 1) if kind is Kind.CLASSES else line.reshape(shape)


def _values(kind: Kind, outputs: Tensor) -> Tensor:
    wide = outputs.double()
    if kind is Kind.CLASSES:
        return wide.softmax(1)
    return wide.sigmoid() if kind is Kind.FLAGS else wide


def load_ensemble(folder: str | Path, trust: bool = False) -> Ensemble:
    """Load an ensemble that 'tutti ensemble' wrote, in evaluation mode.

    Args:
        folder: of the ensemble.
        trust: whether it may name code of others, which runs then.

    Raises:
        BadRunFolder: there is none, or it is damaged.
        Untrusted: it names code, and no run of this user has written it.
    """
    folder = Path(folder)
    record = read_trusted(folder, trust)
    ensemble = Ensemble(record)
    load_weights(ensemble, folder / WEIGHTS)
    return ensemble.eval()
