"""Command lines become configurations, or one clear error."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

import pytest
from typing_extensions import override

from tutti.cli.centre import CentreCommand
from tutti.cli.compare import CompareCommand, own_options
from tutti.cli.options import Words, accuracy, command_words, parse_value, split_dotted
from tutti.cli.run import RunCommand
from tutti.cli.train import TrainCommand, config_of
from tutti.errors import BadOption, UnknownName
from tutti.models.tabular import DEFAULTS
from tutti.run.config import TrainConfig


def parsed(*words: str) -> TrainConfig:
    caught: list[TrainConfig] = []

    class Parsed(TrainCommand):
        @override
        def run(self, words: Words) -> int:
            caught.append(config_of(words))
            return 0

    Parsed()(words)
    return caught[0]


def config_of_words(
    given: dict[str, Any], dotted: dict[str, Any], base: TrainConfig | None = None
) -> TrainConfig:
    return Words([], argparse.Namespace(), given, dotted).config(base)


def test_the_model_is_the_word_without_a_dash_and_other_fields_keep_their_defaults() -> None:
    assert parsed() == TrainConfig()
    config = parsed("lenet", "--data", "mnist", "-n", "2", "--batch-size", "64", "--lr=0.1")
    assert (config.model, config.data, config.workers) == ("lenet", "mnist", "2")
    assert (config.batch_size, config.lr) == (64, 0.1)


def test_flags_have_no_value() -> None:
    assert parsed("--restore-best").restore_best is True
    assert parsed("--no-restore-best").restore_best is False
    assert command_words(parsed("lenet", "--restore-best")) == ["lenet", "--restore-best"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-3", 1e-3),
        ("true", True),
        ("True", True),
        ("null", None),
        ("relu", "relu"),
        ("256,128", [256, 128]),
        ("[256, 128]", [256, 128]),
        ("0.9,0.99", [0.9, 0.99]),
        ("a,b", ["a", "b"]),
        ("256,", [256]),
        (".9", 0.9),
        (".9,-5.", [0.9, -5.0]),
        ("1.2.3", "1.2.3"),
    ],
)
def test_the_option_of_a_part_is_json_a_list_or_text(text: str, value: object) -> None:
    assert parse_value(text) == value


def test_options_are_collected_by_part() -> None:
    words = ["--model.hidden", "256,128", "--model.activation=tanh", "--optimizer.weight-decay", "-0.5"]
    config = parsed(*words)
    assert config.model_options == {"hidden": [256, 128], "activation": "tanh"}
    assert config.optimizer_options == {"weight_decay": -0.5}


def test_an_option_of_an_unknown_part_names_the_nearest_one() -> None:
    with pytest.raises(UnknownName, match=r"option .--modle\.hidden'; did you mean '--model\.hidden'"):
        split_dotted(["--modle.hidden", "3"])


@pytest.mark.parametrize("words", [["--model.hidden"], ["--model.hidden", "--lr", "1"]])
def test_an_option_of_a_part_needs_a_value(words: list[str]) -> None:
    with pytest.raises(BadOption, match=r"--model\.hidden has no value"):
        split_dotted(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--epoch", "3"], "unknown option '--epoch'; did you mean '--epochs'?"),
        (["mlp", "--hiden", "100"], "unknown option '--hiden'; did you mean '--model.hidden'?"),
        (["--strategy=easgd", "--force", "2"], "unknown option '--force'; did you mean '--strategy.force'?"),
        (["--target", "churn"], "unknown option '--target'; did you mean '--data.target' or '--goal'?"),
        (["--early_stopping"], "did you mean '--patience' or '--monitor'? 'tutti train --help all' explains"),
        (["--target-metric", "0.9"], "did you mean '--goal'?"),
        (["--model", "tabular"], "unknown option '--model'; the model is the first word"),
        (["--quiet"], "unknown option '--quiet'; send the output to a file"),
        ([sys.executable], "is a file, and no model; data come after one: tutti train tabular --data /"),
        (["--device", "gpu"], "unknown value 'gpu' of --device; did you mean 'cuda'?"),
        (["--normalize"], "did you mean '--data.prepare'?"),
        (["--num-workers", "2"], "did you mean '--workers'?"),
        (["--learning_rate=1"], "did you mean '--lr'?"),
        (["--missing", "drop"], "unknown option '--missing'; did you mean '--data.missing'?"),
        (["--batchsize=3"], "unknown option '--batchsize'; did you mean '--batch-size'?"),
        (["mlp", "lenet"], "unknown argument 'lenet'"),
        (["mlp", __file__], "quote a pattern, as in --data 'train-*.h5'"),
        (["--epochs", "five"], "'five' is not a whole number"),
        (["--batch-size", "five"], "'five' is not a whole number"),
        (["--lr", "fast"], "'fast' is not a number"),
        (["--epochs"], "argument --epochs: expected one argument"),
        (["--lr", "-1e-3"], "--lr is -0.001; give a finite number above 0"),
        (["--lr", "nan"], "--lr is nan"),
        (["--epochs", "-3"], "--epochs is -3; the smallest possible is 1"),
        (["-n", "-2"], "--workers is '-2'; give a whole number"),
        (["-n", "2.5"], "--workers is '2.5'"),
        (["-n", "²"], "--workers is '²'"),
        (["-n", "99999999999"], "--workers is '99999999999'; give a whole number"),
        (["--threads", "99999999999"], "--threads is 99999999999; the largest possible is 65536"),
        (["--epochs", "1", "--steps", "1"], "--epochs 1 does not go with --steps 1"),
        (["--validation", "1"], "--validation is 1.0; give a share"),
        (["--precision", "fp31"], "unknown value 'fp31' of --precision; did you mean 'fp32'?"),
        (
            ["--config", "/no/such.json"],
            "cannot read the configuration '/no/such.json': No such file or directory; give",
        ),
    ],
)
def test_a_wrong_option_is_named_with_a_remedy(words: list[str], message: str) -> None:
    with pytest.raises((BadOption, UnknownName)) as caught:
        parsed(*words)
    assert message in str(caught.value)


def test_wrong_options_of_other_commands_are_refused() -> None:
    with pytest.raises(
        BadOption, match=r"argument --goal: 'high' is not an accuracy, such as 0\.97; 'tutti compare --help"
    ):
        CompareCommand()(["--goal", "high"])
    with pytest.raises(BadOption, match="--workers is -3; give 0"):
        CentreCommand()(["--listen", "127.0.0.1:0", "--keep", "no", "--workers", "-3"])
    with pytest.raises(BadOption, match="required: PROGRAM; 'tutti run --help'"):
        RunCommand()(["-n", "2"])


@pytest.mark.parametrize("text", ["0.97", "accuracy 0.97", "validation accuracy >= 0.97", "accuracy>0.97"])
def test_the_goal_of_a_comparison_may_have_the_form_of_that_of_a_run(text: str) -> None:
    assert accuracy(text) == 0.97


def test_an_option_for_one_strategy_may_name_a_strategy_in_a_file() -> None:
    given = ["mine.py:Clipped:lr=0.1", "gem:optimizer=sgd", "mine.py:Clipped:strategy.every=3"]
    assert own_options(given) == {
        "mine.py:Clipped": {"lr": 0.1, "strategy.every": 3},
        "gem": {"optimizer": "sgd"},
    }
    with pytest.raises(BadOption, match="give STRATEGY:KEY=VALUE"):
        own_options(["gem=3"])


def test_options_override_the_file() -> None:
    base = TrainConfig(model="mlp", model_options={"hidden": [3]}, epochs=3, lr=0.1)
    config = config_of_words({"steps": 5, "lr": 0.2}, {"model_options": {"activation": "tanh"}}, base)
    assert (config.steps, config.epochs, config.lr) == (5, None, 0.2)
    assert config.model_options == {"hidden": [3], "activation": "tanh"}


def test_another_model_does_not_inherit_the_options_of_the_file() -> None:
    base = TrainConfig(model="mlp", model_options={"hidden": [3]})
    assert config_of_words({"model": "lenet"}, {}, base).model_options == {}
    assert config_of_words({"model": "mlp"}, {}, base).model_options == {"hidden": [3]}


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ((), DEFAULTS),
        (("--batch-size", "32"), {**DEFAULTS, "batch_size": 32}),
        (("--optimizer", "sgd"), {"optimizer": "sgd", "lr": None, "optimizer_options": {}}),
        (("--optimizer.eps", "1"), {**DEFAULTS, "optimizer_options": {"weight_decay": 0.1, "eps": 1}}),
        (("--steps", "3"), {"steps": 3, "epochs": None}),
    ],
)
def test_a_model_has_defaults_that_options_override(
    words: tuple[str, ...], wanted: dict[str, object]
) -> None:
    config = parsed("tabular", *words)
    assert {name: getattr(config, name) for name in wanted} == wanted


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(),
        config_of_words({"model": "tabular"}, {}),
        config_of_words({"model": "tabular", "batch_size": 32}, {}),
        TrainConfig(
            model="lenet", data="my data.npz", workers="2", threads=1, layout="channels_last", lr=1e-4
        ),
        TrainConfig(
            model="mlp",
            model_options={"hidden": [256, 128], "activation": "relu", "dropout": 0.1, "wide": True},
            optimizer_options={"betas": [0.9, 0.99], "decay": 0, "name": "0.5", "none": None, "list": []},
        ),
    ],
)
def test_the_command_of_a_configuration_makes_the_same_configuration(config: TrainConfig) -> None:
    assert parsed(*shlex.split(shlex.join(command_words(config)))) == config
