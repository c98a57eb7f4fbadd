from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tutti.errors import BadOption, UnknownName, UserError
from tutti.run.config import TrainConfig
from tutti.studies.search.methods import check_pruner, check_sampler
from tutti.studies.search.objectives import aims_of
from tutti.studies.search.space import Choice, Range, read_space, space_of
from tutti.studies.search.trials import distributions_of, options_of

MLP = TrainConfig(model="mlp", epochs=2)


def test_forms() -> None:
    given = {
        "lr": "log:1e-4..1e-1",
        "batch-size": "16..256",
        "clip_norm": "1..10",
        "model.dropout": "0.1..0.9",
        "model.hidden": [[64], [128, 64]],
        "optimizer": ["adam", "sgd"],
    }
    space = space_of(given)
    assert space.dimensions == {
        "lr": Range(1e-4, 1e-1, log=True),
        "batch_size": Range(16, 256, whole=True),
        "clip_norm": Range(1, 10),
        "model.dropout": Range(0.1, 0.9),
        "model.hidden": Choice(("[64]", "[128, 64]")),
        "optimizer": Choice(('"adam"', '"sgd"')),
    }
    space.check(MLP)
    assert space_of(space.as_json()) == space


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "space.toml"
    file.write_text(
        'lr = "log:1e-4..1e-1"\nmodel.hidden = [[8], [16, 8]]\n[optimizer]\nmomentum = "0.1..0.9"\n'
    )
    assert list(space_of(read_space(file)).dimensions) == ["lr", "model.hidden", "optimizer.momentum"]
    file.write_text("lr =")
    with pytest.raises(BadOption, match="is no TOML"):
        read_space(file)
    with pytest.raises(BadOption, match="cannot read the space"):
        read_space(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "nothing is to be searched"),
        ({"lr": "log:0..1"}, "0 has no logarithm"),
        ({"lr": "log:-1..1"}, "-1 has no logarithm"),
        ({"lr": "0.5..0.1"}, "is empty"),
        ({"lr": "0.5..0.5"}, "a single value"),
        ({"lr": "1e-3..nan"}, "not finite"),
        ({"lr": "a..b"}, "'a' is not a number"),
        ({"lr": 0.1}, "nothing to search"),
        ({"lr": "0.1"}, "nothing to search"),
        ({"lr": [0.1, 0.2, 0.1]}, "0.1 twice"),
        ({"lr": [0.1]}, "no choice"),
        ({"batch_size": "16..64", "batch-size": "8..16"}, "given twice"),
        ({"batch_size": "0.5..8"}, "give a whole number"),
        ({"batch_size": "0..8"}, "smallest possible is 1"),
        ({"lr": "-1..1"}, "finite number above 0"),
        ({"seed": "1..8"}, "give --seed once"),
        ({"data.path": ["a", "b"]}, "one data set"),
        ({"lrr": "1..8"}, "did you mean '--space.lr'"),
        ({"modle.hidden": [1, 2]}, "unknown option"),
        ({"model.hiden": [1, 2]}, "did you mean 'hidden'"),
        ({"precision": ["fp32", "fp31"]}, "did you mean 'fp32'"),
    ],
)
def test_bad_spaces(given: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        space_of(given).check(MLP)


def test_values_that_optuna_does_not_tell_apart_come_back_as_they_were() -> None:
    space = space_of({"model.hidden": [[64], 64], "strategy.nested": [1, True, 1.0, None], "lr": [0.1, 0.2]})
    assert distributions_of(space)["lr"].choices == (0.1, 0.2)
    chosen = {"model.hidden": "[64]", "strategy.nested": "true", "lr": 0.2}
    assert repr(options_of(space, chosen)) == repr({"model.hidden": [64], "strategy.nested": True, "lr": 0.2})


def test_methods_that_do_not_fit() -> None:
    numbers = distributions_of(space_of({"lr": "0.1..0.2", "batch_size": [1, 2]}))
    for name, objectives, said in (
        ("gpp", 1, "did you mean 'gp'"),
        ("cma-es", 1, "at least two ranges"),
        ("grid", 1, "--space.lr is a range"),
    ):
        with pytest.raises(UserError, match=said):
            check_sampler(name, numbers, objectives)
    with pytest.raises(BadOption, match="did you mean 'accuracy'"):
        aims_of(["acuracy"])
    with pytest.raises(BadOption, match="one objective"):
        check_sampler("cma-es", distributions_of(space_of({"lr": "0.1..0.2", "seed": "1..2"})), 2)
    loss, seconds = aims_of(["loss", "seconds"])
    for name, aims, epochs, said in (
        ("ash", [loss], True, "did you mean 'asha'"),
        ("asha", [loss, seconds], True, "one objective"),
        ("asha", [seconds], True, "have no 'seconds'"),
        ("asha", [loss], False, "give --epochs"),
    ):
        with pytest.raises(UserError, match=said):
            check_pruner(name, aims, epochs)


def test_objectives() -> None:
    accuracy, mine = aims_of(["accuracy", "mine:lower"])
    assert (accuracy.higher, mine.higher) == (True, False)
    assert [str(accuracy), str(mine)] == ["accuracy", "mine:lower"]
    for names, said in ((["mine"], "mine:higher"), ([], "names nothing"), (["loss", "loss:higher"], "twice")):
        with pytest.raises(BadOption, match=said):
            aims_of(names)
    with pytest.raises(UnknownName):
        check_pruner("nun", [accuracy], True)
