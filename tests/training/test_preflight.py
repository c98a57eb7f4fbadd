"""Model, data, loss and metrics that do not fit are found out before the first step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tutti.data.batches import Batches
from tutti.data.parts import Part
from tutti.errors import BadData, BadModel, BadOption
from tutti.training.evaluation import Objective
from tutti.training.losses import LOSSES
from tutti.training.metrics import METRICS
from tutti.training.metrics.built_in import top
from tutti.training.preflight import check_fit, check_smallest_batch

CROSS_ENTROPY = LOSSES["cross_entropy"]
PART = Part(torch.randn(50, 8), torch.arange(50) % 3)


def test_a_model_that_fits_is_left_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 3))
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    random = torch.get_rng_state()
    check_fit(module, PART, Objective(CROSS_ENTROPY, [METRICS["accuracy"]], 3))
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)
    assert all(part.training for part in module.modules())
    assert all(parameter.grad is None for parameter in module.parameters())


def test_a_model_for_other_inputs_is_refused_with_their_shape() -> None:
    with pytest.raises(
        BadModel, match=r"the model cannot take a batch of shape \(2, 8\) float32: RuntimeError"
    ):
        check_fit(nn.Linear(9, 3), PART, Objective(CROSS_ENTROPY))


def test_a_label_anywhere_in_the_data_is_found() -> None:
    targets = PART.targets.clone()
    targets[33] = 7
    with pytest.raises(BadData, match="labels go from 0 to 7"):
        check_fit(nn.Linear(8, 3), Part(PART.inputs, targets), Objective(CROSS_ENTROPY))


def test_a_metric_that_does_not_fit_is_refused() -> None:
    with pytest.raises(BadModel, match="top5"):
        check_fit(nn.Linear(8, 1), Part(PART.inputs, torch.randn(50)), Objective(LOSSES["mse"], [top(5)]))


def test_an_error_in_the_users_own_code_is_placed() -> None:
    class Wrong(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs.view(-1, 5)

    with pytest.raises(BadModel, match=r"RuntimeError: .* \(at .*test_preflight\.py, line \d+\)"):
        check_fit(Wrong(), PART, Objective(CROSS_ENTROPY))


@pytest.mark.parametrize(
    ("ranks", "passes", "fits"), [(1, 1, True), (5, 1, True), (6, 1, False), (2, 3, False)]
)
def test_a_single_sample_is_refused_only_where_it_happens(ranks: int, passes: int, fits: bool) -> None:
    module, batches = nn.BatchNorm1d(8), Batches(PART, 10, size=ranks, passes=passes)
    if fits:
        check_smallest_batch(module, batches)
    else:
        with pytest.raises(BadOption, match="cannot train on that"):
            check_smallest_batch(module, batches)


class Renormed(nn.Linear):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.weight.data = torch.renorm(self.weight.data, 2, 0, 1.0)
        return super().forward(inputs)


class Looked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 3, max_norm=1.0)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.table((inputs[:, 0] > 0).long())


def test_a_forward_pass_that_writes_weights_which_others_train_too_is_refused() -> None:
    objective = Objective(CROSS_ENTROPY)
    check_fit(Looked(), PART, objective)
    for module, together in ((Looked(), True), (Renormed(8, 3), False)):
        with pytest.raises(BadModel, match="writes its weight"):
            check_fit(module, PART, objective, together)
