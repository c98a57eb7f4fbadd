"""The learning rate falls when the validation loss stays, as torch's ReduceLROnPlateau means it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau

import tutti
from tutti.errors import BadOption

pytestmark = pytest.mark.usefixtures("nothing_beside")

INPUTS = torch.rand(90, 6, generator=torch.Generator().manual_seed(0))
DATA = INPUTS, (INPUTS.sum(1) * 2).long().clamp(0, 4)
RULE = {"factor": 0.5, "patience": 1, "threshold": 0.1}


def train(out: Path | None = None, **given: Any) -> tutti.Result:
    usual: dict[str, Any] = {
        "schedule": "plateau", "schedule_options": RULE, "optimizer": "sgd", "lr": 0.2, "epochs": 8,
        "batch_size": 30, "validation": 0.2, "workers": 1, "threads": 1, "quiet": True,
    }  # fmt: skip
    return tutti.train("mlp", DATA, out=None if out is None else str(out), **{**usual, **given})


def expected(result: tutti.Result, epochs: int, part: str = "validation") -> list[float]:
    """The rate of each epoch, by torch's own scheduler."""
    optimizer = SGD([torch.zeros(1, requires_grad=True)], lr=0.2)
    plateau, rates = ReduceLROnPlateau(optimizer, **RULE), []  # type: ignore[arg-type]
    for record in result.history[:epochs]:
        rates.append(optimizer.param_groups[0]["lr"])
        plateau.step(getattr(record, part).loss)
    return rates


def test_the_rate_follows_the_validation_loss_and_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = train(tmp_path / "run", checkpoint="3 epochs")
    rates = [record.lr for record in whole.history]
    assert rates == expected(whole, 8)
    assert len(set(rates)) > 2
    again = train(tmp_path / "run", resume=tmp_path / "run/checkpoints/step-00000009")
    assert [record.lr for record in again.history] == rates
    ours, theirs = again.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    longer = train(tmp_path / "run", resume=tmp_path / "run/checkpoints/step-00000009", epochs=9)
    assert [record.lr for record in longer.history] == expected(longer, 9)


def test_where_the_loss_comes_too_late_it_is_refused() -> None:
    with pytest.raises(BadOption, match="before the next one begins"):
        train(validate="background", strategy="hogwild")
