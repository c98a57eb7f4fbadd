"""The built-in models, and models by name."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tutti import models
from tutti.errors import BadModel, BadOption, UnknownName
from tutti.models.mlp import ACTIVATIONS
from tutti.records.preparation import TableInputs

OWN = "tests.models.factories"


def built(
    name: str, shape: tuple[int, ...], outputs: int = 10, table: TableInputs | None = None, **options: object
) -> nn.Module:
    """A model whose weights are whatever was in memory: to draw so many takes seconds."""
    with pytest.MonkeyPatch.context() as patched:
        for draw in ("kaiming_normal_", "kaiming_uniform_", "normal_", "uniform_", "xavier_uniform_"):
            patched.setattr(nn.init, draw, lambda tensor, *_, **__: tensor)
        return models.build(name, shape, outputs, options, table)


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def sizes(module: nn.Module) -> list[int]:
    """The outputs of the dense layers."""
    return [layer.out_features for layer in module.modules() if isinstance(layer, nn.Linear)]


def embeddings(module: nn.Module) -> list[nn.Embedding]:
    return [layer for layer in module.modules() if isinstance(layer, nn.Embedding)]


LARGE = (3, 224, 224)


@pytest.mark.parametrize(
    ("name", "shape", "options", "known"),
    [
        ("mlp", (1, 28, 28), {}, 784 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10),
        # Cosines, signs, hidden layers, and the last layers of 16 members.
        ("tabular", (10,), {}, 10 * (2 * 16 + 3 * 17) + 16 * 40 + 41 * 128 + 129 * 128 + 16 * 129 * 10),
        ("lenet", (1, 28, 28), {}, 61_706),
        ("cnn", (1, 28, 28), {}, 421_642),
        # As published.
        ("alexnet", LARGE, {}, 61_100_840),
        ("googlenet", LARGE, {"batch_norm": False}, 6_998_552),
        ("mobilenet", LARGE, {}, 3_504_872),
        ("resnet18", LARGE, {}, 11_689_512),
        ("resnet50", LARGE, {}, 25_557_032),
        ("vgg11", LARGE, {"batch_norm": False}, 132_863_336),
        # As usual for CIFAR-10.
        ("mobilenet", (3, 32, 32), {}, 2_236_682),
        ("resnet18", (3, 32, 32), {}, 11_173_962),
        ("resnet50", (3, 32, 32), {}, 23_520_842),
        ("vgg11", (3, 32, 32), {}, 9_228_362),
        ("vgg16", (3, 32, 32), {}, 14_724_042),
    ],
)
def test_models_have_their_known_sizes(
    name: str, shape: tuple[int, ...], options: dict[str, object], known: int
) -> None:
    assert count(built(name, shape, 1000 if shape == LARGE else 10, **options)) == known


def test_a_narrower_mobilenet_has_the_published_number_of_parameters() -> None:
    # In millions: timm's mobilenetv2_050.
    assert round(count(built("mobilenet", LARGE, 1000, width=0.5)) / 1e6, 2) == 1.97


PHOTOGRAPHS = ("alexnet", "googlenet", "mobilenet", "resnet18", "vgg11")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp", (64,)),
        ("mlp", (3, 5, 4)),
        ("tabular", (64,)),
        ("tabular", (3, 5, 4)),
        ("lenet", (3, 12, 17)),
        ("lenet", (28, 28)),
        ("cnn", (4, 5)),
        ("cnn", (2, 33, 20)),
        ("vgg11", (17, 20)),
        *((name, shape) for name in PHOTOGRAPHS for shape in (LARGE, (28, 28))),
    ],
)
def test_models_fit_themselves_to_the_input_and_the_outputs(name: str, shape: tuple[int, ...]) -> None:
    with torch.no_grad():
        assert built(name, shape, 7).eval()(torch.zeros(2, *shape)).shape == (2, 7)


@pytest.mark.parametrize(
    ("name", "side", "options"),
    [
        ("lenet", 12, {}),
        ("cnn", 4, {}),
        ("vgg11", 17, {}),
        ("alexnet", 8, {"stem": "small"}),
        ("alexnet", 63, {"stem": "large"}),
        *((name, 9, {"stem": "small"}) for name in ("googlenet", "mobilenet", "resnet18")),
        *((name, 33, {"stem": "large"}) for name in ("googlenet", "mobilenet", "resnet18")),
    ],
)
def test_the_smallest_image_works_and_a_smaller_one_is_refused(
    name: str, side: int, options: dict[str, object]
) -> None:
    # One sample, in training: what is left of a batch for a worker may be that small.
    assert built(name, (1, side, side), 3, **options).train()(torch.zeros(1, 1, side, side)).shape == (1, 3)
    with pytest.raises(BadModel, match=f"at least {side} x {side}"):
        built(name, (1, side, side - 1), 3, **options)


@pytest.mark.parametrize(("side", "stem", "maps"), [(64, "auto", 2), (63, "auto", 8), (72, "small", 9)])
def test_small_images_are_halved_three_times_and_large_ones_five_times(
    side: int, stem: str, maps: int
) -> None:
    module, shapes = built("resnet18", (3, side, side), stem=stem), []
    for layer in module.children():
        layer.register_forward_hook(lambda _, __, outputs: shapes.append(tuple(outputs.shape)))
    module(torch.zeros(1, 3, side, side))
    assert (1, 512, maps, maps) in shapes


def test_the_layers_of_the_mlp_and_of_vgg_are_options() -> None:
    module = built("mlp", (4,), 2, hidden=[5], activation="Sigmoid", dropout=0.5)
    assert [type(layer) for layer in module] == [nn.Flatten, nn.Linear, nn.Sigmoid, nn.Dropout, nn.Linear]
    assert sizes(built("vgg11", (3, 32, 32), hidden=[20, 30])) == [20, 30, 10]
    for hidden in ((7, 3), "7,3", "[7, 3]", "7 3"):
        assert sizes(built("mlp", (4,), 2, hidden=hidden)) == [7, 3, 2]
    assert sizes(built("mlp", (4,), 2, hidden="")) == [2]
    assert {"relu", "sigmoid", "tanh", "gelu"} <= ACTIVATIONS.keys()


@pytest.mark.parametrize(
    ("name", "options"), [("mobilenet", {"width": 0.1}), ("vgg11", {}), ("resnet18", {})]
)
def test_weights_begin_as_in_the_reference(name: str, options: dict[str, object]) -> None:
    torch.manual_seed(0)
    module = models.build(name, (3, 32, 32), 100, options)
    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    largest = max(convolutions, key=lambda layer: layer.weight.numel())
    fan_out = largest.out_channels * math.prod(largest.kernel_size)
    assert largest.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.05)


def test_a_residual_block_adds_its_inputs() -> None:
    block = models.build("resnet18", (3, 9, 9), 2).eval().layer1[0]
    nn.init.zeros_(block.conv2.weight)
    inputs: Tensor = torch.rand(1, 64, 3, 3)
    assert torch.equal(block(inputs), inputs)


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("lenett", {}, UnknownName, r"'lenet'\?.*package.module:factory.*\*\.pt2"),
        ("mlp", {"hiden": 3}, UnknownName, "'hidden'"),
        ("mlp", {"activation": "rellu"}, UnknownName, "'relu'"),
        ("mlp", {"hidden": "big"}, BadOption, "'hidden'"),
        ("mlp", {"hidden": [3, 0]}, BadOption, "'hidden'"),
        ("mlp", {"hidden": 2.5}, BadOption, "'hidden'"),
        ("mlp", {"dropout": 1.0}, BadOption, "'dropout'"),
        ("mlp", {"shape": [3]}, BadOption, "'shape'"),
        ("tabular", {"members": 0}, BadOption, "'members'"),
        ("cnn", {"channels": 5}, BadOption, "'channels'"),
        ("cnn", {"hidden": [5, 5]}, BadOption, "'hidden'"),
        ("lenet", {"hidden": 5}, UnknownName, "'hidden'"),
        ("alexnet", {"stem": "smal"}, UnknownName, "'small'"),
        ("googlenet", {"batch_norm": "no"}, BadOption, "'batch_norm'"),
        ("mobilenet", {"width": 0}, BadOption, "'width'"),
        ("resnet50", {"dropout": 0.1}, UnknownName, "'dropout'"),
        (f"{OWN}:wrong", {}, BadModel, "'str'"),
        (f"{OWN}:fitted", {"wdith": 1}, UnknownName, "'width'"),
        (f"{OWN}:needy", {}, BadOption, "'depth'"),
        (f"{OWN}:number", {}, BadOption, "int"),
        (f"{OWN}:fited", {}, UnknownName, "'fitted'"),
        (f"{OWN}:built", {"width": 5}, BadOption, "width"),
    ],
)
def test_wrong_models_are_refused(
    name: str, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        models.build(name, (1, 28, 28), 10, options)


@pytest.mark.parametrize("name", ["lenet", "cnn", *PHOTOGRAPHS])
def test_vectors_are_no_images(name: str) -> None:
    with pytest.raises(BadModel, match="'mlp'"):
        models.build(name, (64,), 10)


def test_a_factory_gets_the_shape_and_the_outputs_when_it_asks_for_them() -> None:
    assert sizes(models.build(f"{OWN}:fitted", (6,), 3, {"width": 5})) == [5, 3]
    assert sizes(models.build(f"{OWN}:Own", (2,), 4)) == [4]
    assert sizes(models.build(f"{Path(__file__).with_name('factories.py')}:fixed", (3,), 9)) == [2]
    assert models.build(f"{OWN}:built", (3,), 2) is models.build(f"{OWN}:built", (3,), 2)


TABLE = TableInputs(numbers=2, flags=1, categories=(40, 1000))


def test_texts_of_a_table_become_vectors_of_fastai_s_widths() -> None:
    module = built("mlp", (5,), 2, table=TABLE)
    assert [layer.embedding_dim for layer in embeddings(module)] == [13, 77]
    assert module[1].in_features == 3 + 13 + 77
    narrow = built("tabular", (5,), 2, table=TABLE, embed=6)
    assert [layer.embedding_dim for layer in embeddings(narrow)] == [6, 6]
    assert not embeddings(built("mlp", (3,), 2, table=TableInputs(2, 1)))


@pytest.mark.parametrize("name", ["mlp", "tabular"])
def test_a_text_that_training_never_sees_changes_little(name: str) -> None:
    torch.manual_seed(0)
    module = models.build(name, (5,), 2, table=TABLE).eval()
    seen, other, numbers = torch.tensor([[0.5, -1, 1, 3, 7], [0.5, -1, 1, 0, 0], [2.5, 1, 0, 3, 7]])
    first, second, third = module(torch.stack([seen, other, numbers]))
    assert 0 < (first - second).abs().max() < (first - third).abs().max() / 5


def test_the_members_of_tabular_differ_and_their_mean_is_its_output() -> None:
    torch.manual_seed(0)
    module = models.build("tabular", (5,), 2, {"dropout": 0.0, "members": 3}, TABLE)
    inputs = torch.tensor([[0.5, -1, 1, 3, 7], [2.5, 1, 0, 39, 999]])
    members = torch.stack(module(inputs)["members"])
    assert members.shape == (3, 2, 2)
    assert (members.std(0) > 1e-3).all()
    assert torch.equal(module.eval()(inputs), members.mean(0))


def test_listing_the_names_does_not_import_torch() -> None:
    code = (
        "import sys, tutti.models; assert 'lenet' in tutti.models.MODELS; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
