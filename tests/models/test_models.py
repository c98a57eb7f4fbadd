"""The built-in models, and models by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tutti import models
from tutti.errors import BadModel, BadOption, UnknownName
from tutti.models.mlp import ACTIVATIONS


def parameters(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def outputs_of(module: nn.Module, shape: tuple[int, ...], batch: int = 2) -> tuple[int, ...]:
    return tuple(module(torch.randn(batch, *shape)).shape)


@pytest.mark.parametrize(
    ("name", "shape", "count"),
    [
        ("mlp", (1, 28, 28), 784 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10),
        ("lenet", (1, 28, 28), 61_706),
        ("cnn", (1, 28, 28), 421_642),
        ("vgg11", (3, 32, 32), 9_228_362),
    ],
)
def test_built_in_models_have_their_known_sizes(name: str, shape: tuple[int, ...], count: int) -> None:
    assert parameters(models.build(name, shape, 10)) == count


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp", (64,)),
        ("mlp", (3, 5, 4)),
        ("lenet", (3, 12, 17)),
        ("lenet", (28, 28)),
        ("lenet", (1, 32, 32)),
        ("cnn", (1, 8, 8)),
        ("cnn", (4, 5)),
        ("cnn", (2, 33, 20)),
        ("vgg11", (1, 28, 28)),
        ("vgg11", (17, 20)),
        ("vgg11", (3, 40, 64)),
    ],
)
def test_models_fit_themselves_to_the_input_and_the_outputs(name: str, shape: tuple[int, ...]) -> None:
    assert outputs_of(models.build(name, shape, 7), shape) == (2, 7)


@pytest.mark.parametrize(("name", "smallest"), [("lenet", 12), ("cnn", 4), ("vgg11", 17)])
def test_the_smallest_image_works_and_a_smaller_one_is_refused(name: str, smallest: int) -> None:
    shape = (1, smallest, smallest)
    # One sample, in training: what is left of a batch for a worker may be that small.
    assert outputs_of(models.build(name, shape, 3).train(), shape, batch=1) == (1, 3)
    with pytest.raises(BadModel, match=f"at least {smallest} x {smallest}, but the data's are {smallest} x "):
        models.build(name, (1, smallest, smallest - 1), 3)


@pytest.mark.parametrize("name", ["lenet", "cnn", "vgg11"])
def test_convolutions_want_images(name: str) -> None:
    with pytest.raises(BadModel, match=r"inputs have shape \(64,\); use 'mlp'"):
        models.build(name, (64,), 10)


def test_the_sizes_and_the_activation_of_the_mlp_are_options() -> None:
    module = models.build("mlp", (4,), 2, {"hidden": [5], "activation": "Sigmoid", "dropout": 0.5})
    kinds = [type(layer) for layer in module]
    assert kinds == [nn.Flatten, nn.Linear, nn.Sigmoid, nn.Dropout, nn.Linear]
    assert module[1].out_features == 5


@pytest.mark.parametrize("hidden", [[7, 3], (7, 3), "7,3", "[7, 3]", "7 3"])
def test_sizes_may_be_written_in_several_ways(hidden: object) -> None:
    module = models.build("mlp", (4,), 2, {"hidden": hidden})
    assert [layer.out_features for layer in module if isinstance(layer, nn.Linear)] == [7, 3, 2]


@pytest.mark.parametrize("hidden", [[], ""])
def test_an_mlp_without_hidden_layers_is_linear(hidden: object) -> None:
    assert parameters(models.build("mlp", (4,), 2, {"hidden": hidden})) == 10


@pytest.mark.parametrize("activation", sorted(ACTIVATIONS))
def test_torchs_activations_are_known_by_name(activation: str) -> None:
    module = models.build("mlp", (4,), 2, {"activation": activation})
    assert outputs_of(module, (4,)) == (2, 2)
    assert {"relu", "sigmoid", "tanh", "gelu"} <= ACTIVATIONS.keys()


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("mlp", {"hiden": 3}, UnknownName, "did you mean 'hidden'"),
        ("mlp", {"activation": "rellu"}, UnknownName, "did you mean 'relu'"),
        ("mlp", {"activation": "softmax"}, UnknownName, "unknown value 'softmax' of the option 'activation'"),
        ("mlp", {"hidden": "big"}, BadOption, "'hidden' is 'big'; give whole numbers above 0"),
        ("mlp", {"hidden": [3, 0]}, BadOption, "give whole numbers above 0"),
        ("mlp", {"hidden": 2.5}, BadOption, "give whole numbers above 0"),
        ("mlp", {"dropout": 1.0}, BadOption, "'dropout' is 1.0; give a number from 0 to below 1"),
        ("mlp", {"dropout": "much"}, BadOption, "give a number from 0"),
        ("mlp", {"shape": [3]}, BadOption, "'shape' of model 'mlp' follows from the data"),
        ("cnn", {"channels": 5}, BadOption, "'channels' has 1 numbers; give one for each convolution"),
        ("cnn", {"hidden": [5, 5]}, BadOption, "give one whole number above 0"),
        ("lenet", {"hidden": 5}, UnknownName, "unknown option 'hidden' of the model 'lenet'"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    name: str, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        models.build(name, (1, 28, 28), 10, options)


def test_an_unknown_model_names_the_nearest_and_the_other_way() -> None:
    with pytest.raises(
        UnknownName, match=r"did you mean 'lenet'\?.*package.module:factory.*\*\.pt2, \*\.keras\)"
    ):
        models.build("lenett", (1, 28, 28), 10)


def test_a_factory_gets_the_shape_and_the_outputs_when_it_asks_for_them() -> None:
    module = models.build("tests.models.factories:fitted", (6,), 3, {"width": 5})
    assert [layer.out_features for layer in module if isinstance(layer, nn.Linear)] == [5, 3]
    assert outputs_of(models.build("tests.models.factories:fixed", (3,), 9), (3,)) == (2, 2)
    assert models.build("tests.models.factories:Own", (2,), 4).layer.out_features == 4


def test_a_factory_may_lie_in_a_file() -> None:
    file = Path(__file__).with_name("factories.py")
    assert outputs_of(models.build(f"{file}:fixed", (3,), 2), (3,)) == (2, 2)


def test_a_model_that_is_built_already_is_taken_as_it_is() -> None:
    assert models.build("tests.models.factories:built", (3,), 2) is models.build(
        "tests.models.factories:built", (3,), 2
    )
    with pytest.raises(BadOption, match=r"its options \(width\) have no effect"):
        models.build("tests.models.factories:built", (3,), 2, {"width": 5})


@pytest.mark.parametrize(
    ("spec", "options", "error", "message"),
    [
        (
            "tests.models.factories:wrong",
            {},
            BadModel,
            "returned an object of type 'str'; it must return an nn.Module",
        ),
        ("tests.models.factories:fitted", {"wdith": 1}, UnknownName, "did you mean 'width'"),
        ("tests.models.factories:needy", {}, BadOption, "needs the option 'depth'"),
        ("tests.models.factories:number", {}, BadOption, "is no function or class but int"),
        ("tests.models.factories:fited", {}, UnknownName, "did you mean 'fitted'"),
    ],
)
def test_factories_that_cannot_be_used_are_refused(
    spec: str, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        models.build(spec, (6,), 3, options)


def test_listing_the_names_does_not_import_torch() -> None:
    code = (
        "import sys, tutti.models; assert 'lenet' in tutti.models.MODELS; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
