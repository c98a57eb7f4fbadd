"""Tests of the objects that a farm is begun with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import cloudpickle
import pytest
import torch
from torch import nn

import tutti
from tutti.errors import BadOption
from tutti.run.pickled import Pickled
from tutti.studies.given_weights import numbers_given


def _pickled(value: object) -> dict[str, Pickled]:
    return {"model m": Pickled.of(value, cloudpickle.Pickler)}


def _module(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.LazyLinear(3), nn.Dropout(0.5), nn.BatchNorm1d(3), nn.Linear(3, 2)).to(dtype)


def test_modules_are_told_by_their_weights() -> None:
    same = numbers_given(_pickled(_module(0)))
    assert same == numbers_given(_pickled(_module(0)))
    assert list(same) == ["given model m"]
    other = _module(0)
    other[1] = nn.Dropout(0.1)  # type: ignore[index]
    said = [numbers_given(_pickled(one)) for one in (_module(1), _module(0, torch.bfloat16), other)]
    assert len({one["given model m"] for one in [same, *said]}) == 4


def test_a_farm_goes_on_with_the_weights_that_it_was_begun_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Begun(Exception):
        """The farm is there; nothing is trained."""

    def begun(*_: object) -> None:
        raise Begun

    monkeypatch.setattr("tutti.studies.cross_validation.api.train_shown", begun)
    monkeypatch.setattr("tutti.studies.search.display.tune_shown", begun)
    data = torch.randn(30, 6).numpy(), (torch.arange(30) % 2).numpy()

    begun_with = []

    def see(objects: Mapping[str, Pickled]) -> dict[str, str]:
        found = numbers_given(objects)
        begun_with.append(found)
        return found

    monkeypatch.setattr("tutti.studies.given_weights.numbers_given", see)

    def validate(seed: int, resume: bool = True, bias: bool = True) -> None:
        torch.manual_seed(seed)
        out = str(tmp_path / "cv")
        tutti.cross_validate(
            {"m": nn.Linear(6, 2, bias)}, data, cv=3, epochs=1, threads=1, quiet=True, out=out, resume=resume
        )

    def search(seed: int, resume: bool = True, bias: bool = True) -> None:
        torch.manual_seed(seed)
        out, space = str(tmp_path / "tune"), {"lr": "log:1e-3..1e-1"}
        tutti.tune(
            nn.Linear(6, 2, bias),
            data,
            space,
            trials=2,
            epochs=1,
            threads=1,
            quiet=True,
            out=out,
            resume=resume,
        )

    for ask, name in (validate, "model m"), (search, "model"):
        with pytest.raises(Begun):
            ask(0, resume=False)
        with pytest.raises(Begun):
            ask(0)
        assert capsys.readouterr().err == ""
        with pytest.raises(Begun):
            ask(1)
        assert f"the given {name} has other first weights than" in capsys.readouterr().err
        assert begun_with[0] == begun_with[1] == begun_with[2]
        begun_with.clear()
        with pytest.raises(BadOption, match=rf"given {name} is Linear with weights \w+ \(was Linear with"):
            ask(0, bias=False)
        begun_with.clear()
