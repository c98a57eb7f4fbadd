"""The space and the methods of a search."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from tutti.errors import BadOption, UserError
from tutti.run.config import TrainConfig
from tutti.studies.score import Score
from tutti.studies.search.methods import check_methods
from tutti.studies.search.space import read_space, space_of

MLP = TrainConfig(model="mlp", epochs=2)


def test_ranges_and_lists_are_parsed() -> None:
    given = {
        "lr": "log:1e-4..1e-1",
        "batch-size": "16..256",
        "clip_norm": "1..10",
        "model.dropout": "0.1..0.9",
        "model.hidden": [[64], [128, 64]],
        "optimizer": ["adam", "sgd"],
    }
    space = space_of(given)
    assert space.distributions == {
        "lr": FloatDistribution(1e-4, 1e-1, log=True),
        "batch_size": IntDistribution(16, 256),
        "clip_norm": FloatDistribution(1, 10),
        "model.dropout": FloatDistribution(0.1, 0.9),
        "model.hidden": CategoricalDistribution(("[64]", "[128, 64]")),
        "optimizer": CategoricalDistribution(('"adam"', '"sgd"')),
    }
    space.check(MLP)
    assert space_of(space.written) == space
    assert space.options({"model.hidden": "[128, 64]", "lr": 0.1}) == {"model.hidden": [128, 64], "lr": 0.1}


def test_a_space_is_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "space.toml"
    file.write_text(
        'lr = "log:1e-4..1e-1"\nmodel.hidden = [[8], [16, 8]]\n[optimizer]\nmomentum = "0.1..0.9"\n'
    )
    assert list(space_of(read_space(file)).distributions) == ["lr", "model.hidden", "optimizer.momentum"]
    file.write_text("lr =")
    with pytest.raises(BadOption, match="is no TOML"):
        read_space(file)
    with pytest.raises(BadOption, match="cannot read the space"):
        read_space(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "the space is empty"),
        ({"lr": "log:0..1"}, "low"),
        ({"lr": "log:-1..1"}, "lr.*log"),
        ({"lr": "0.5..0.1"}, "lr is .*low"),
        ({"lr": "a..b"}, "could not convert string to float: 'a'"),
        ({"lr": 0.1}, "neither a range nor a list"),
        ({"lr": "0.1"}, "neither a range nor a list"),
        ({"lr": [0.1, 0.2, 0.1]}, "each once"),
        ({"lr": [0.1]}, "at least two values"),
        ({"batch_size": "0.5..8"}, "give a whole number"),
        ({"batch_size": "0..8"}, "smallest possible is 1"),
        ({"lr": "-1..1"}, "finite number above 0"),
        ({"seed": "1..8"}, "give --seed once"),
        ({"data.path": ["a", "b"]}, "one data set"),
        ({"lrr": "1..8"}, "did you mean 'lr'"),
        ({"modle.hidden": [1, 2]}, "unknown option"),
        ({"precision": ["fp32", "fp31"]}, "did you mean 'fp32'"),
    ],
)
def test_impossible_spaces_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        space_of(given).check(MLP)


@pytest.mark.parametrize(
    ("methods", "scores", "epochs", "said"),
    [
        (("gpp", "none"), "loss", True, "did you mean 'gp'"),
        (("tpe", "ash"), "loss", True, "did you mean 'asha'"),
        (("cma-es", "none"), "loss", True, "two ranges"),
        (("grid", "none"), "loss", True, "lr is a range"),
        (("tpe", "asha"), "loss seconds", True, "one objective"),
        (("tpe", "asha"), "seconds", True, "that each epoch has"),
        (("tpe", "asha"), "loss", False, "give --epochs"),
    ],
)
def test_methods_that_do_not_fit_are_refused(
    methods: tuple[str, str], scores: str, epochs: bool, said: str
) -> None:
    space = space_of({"lr": "0.1..0.2", "batch_size": [1, 2]})
    with pytest.raises(UserError, match=said):
        check_methods(*methods, space, [*map(Score.read, scores.split())], epochs)
