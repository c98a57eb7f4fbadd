"""The built-in networks for photographs, beside their papers and reference implementations."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from tutti import models
from tutti.errors import BadModel, BadOption, UnknownName

SMALLEST = {"alexnet": 8, "googlenet": 9, "mobilenet": 9, "resnet18": 9, "resnet50": 9}
SMALLEST_LARGE = {"alexnet": 63, "googlenet": 33, "mobilenet": 33, "resnet18": 33, "resnet50": 33}


def shaped(name: str, shape: tuple[int, ...], outputs: int = 1000, **options: object) -> nn.Module:
    """A model whose weights are whatever was in memory: to draw so many takes seconds."""
    with pytest.MonkeyPatch.context() as patched:
        for draw in ("kaiming_normal_", "kaiming_uniform_", "normal_", "uniform_", "xavier_uniform_"):
            patched.setattr(nn.init, draw, lambda tensor, *_, **__: tensor)
        return models.build(name, shape, outputs, options)


def passed(module: nn.Module, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The shapes of what each layer gives for one sample: in training a worker may have no more."""
    shapes: list[tuple[int, ...]] = []
    for layer in module.children():
        layer.register_forward_hook(lambda _, __, outputs: shapes.append(tuple(outputs.shape)))
    with torch.no_grad():
        module(torch.zeros(1, *shape))
    return shapes


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("name", "options", "published"),
    [
        ("alexnet", {}, 61_100_840),
        ("googlenet", {"batch_norm": False}, 6_998_552),
        ("mobilenet", {}, 3_504_872),
        ("resnet18", {}, 11_689_512),
        ("resnet50", {}, 25_557_032),
        ("vgg11", {"batch_norm": False}, 132_863_336),
        ("vgg13", {"batch_norm": False}, 133_047_848),
        ("vgg16", {"batch_norm": False}, 138_357_544),
        ("vgg19", {"batch_norm": False}, 143_667_240),
    ],
)
def test_networks_have_the_published_number_of_parameters(
    name: str, options: dict[str, object], published: int
) -> None:
    assert count(shaped(name, (3, 224, 224), **options)) == published


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("mobilenet", 2_236_682),
        ("resnet18", 11_173_962),
        ("resnet50", 23_520_842),
        ("vgg11", 9_228_362),
        ("vgg16", 14_724_042),
    ],
)
def test_networks_for_small_images_have_the_sizes_usual_for_cifar(name: str, known: int) -> None:
    assert count(shaped(name, (3, 32, 32), 10)) == known


@pytest.mark.parametrize("name", ["alexnet", "googlenet", "mobilenet", "resnet18", "resnet50", "vgg11"])
@pytest.mark.parametrize("shape", [(3, 224, 224), (1, 32, 32), (28, 28)])
def test_networks_fit_themselves_to_the_images(name: str, shape: tuple[int, ...]) -> None:
    assert passed(shaped(name, shape, 7), shape)[-1] == (1, 7)


@pytest.mark.parametrize(
    ("name", "last", "options"),
    [("alexnet", 256, {}), ("googlenet", 1024, {}), ("resnet18", 512, {})],
)
def test_small_images_are_halved_three_times_and_large_ones_five_times(
    name: str, last: int, options: dict[str, object]
) -> None:
    wanted = {(64, "auto"): 1 if name == "alexnet" else 2, (63, "auto"): 8, (72, "small"): 9}
    for (side, stem), maps in wanted.items():
        module = shaped(name, (3, side, side), stem=stem, **options)
        assert (1, last, maps, maps) in passed(module, (3, side, side))


@pytest.mark.parametrize("name", SMALLEST)
@pytest.mark.parametrize("stem", ["small", "large"])
def test_the_smallest_image_works_and_a_smaller_one_is_refused(name: str, stem: str) -> None:
    side = (SMALLEST if stem == "small" else SMALLEST_LARGE)[name]
    assert passed(shaped(name, (1, side, side), 3, stem=stem), (1, side, side))[-1] == (1, 3)
    with pytest.raises(BadModel, match=f"at least {side} x {side}, but the data's are {side} x {side - 1}"):
        shaped(name, (1, side, side - 1), stem=stem)


@pytest.mark.parametrize("name", SMALLEST)
def test_vectors_are_no_images(name: str) -> None:
    with pytest.raises(BadModel, match=r"inputs have shape \(64,\); use 'mlp'"):
        shaped(name, (64,))


def test_the_dense_layers_of_vgg_are_an_option() -> None:
    wide = shaped("vgg13", (3, 32, 32), 10, hidden=[20, 30])
    sizes = [layer.out_features for layer in wide.modules() if isinstance(layer, nn.Linear)]
    dropped = [layer.p for layer in wide.modules() if isinstance(layer, nn.Dropout)]
    assert sizes == [20, 30, 10]
    assert dropped == [0.5, 0.5]
    assert not any(isinstance(layer, nn.Dropout) for layer in shaped("vgg13", (3, 32, 32)).modules())
    assert [
        x.p for x in shaped("vgg13", (3, 32, 32), dropout=0.1).modules() if isinstance(x, nn.Dropout)
    ] == [0.1]


def test_a_narrower_mobilenet_has_the_published_number_of_parameters() -> None:
    # In millions: timm's mobilenetv2_050 and mobilenetv2_140.
    for width, published in {0.5: 1.97, 1.4: 6.11}.items():
        assert round(count(shaped("mobilenet", (3, 224, 224), width=width)) / 1e6, 2) == published


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        (
            "alexnet",
            {"stem": "smal"},
            UnknownName,
            "unknown value 'smal' of the option 'stem'; did you mean 'small'",
        ),
        ("alexnet", {"dropout": 1}, BadOption, "'dropout' is 1; give a number from 0"),
        ("alexnet", {"hiden": 1}, UnknownName, "did you mean 'hidden'"),
        ("googlenet", {"batch_norm": "no"}, BadOption, "'batch_norm' is 'no'; give true or false"),
        ("mobilenet", {"width": 0}, BadOption, "'width' is 0; give a number above 0"),
        ("mobilenet", {"width": "wide"}, BadOption, "'width' is 'wide'"),
        ("resnet18", {"stem": True}, UnknownName, "unknown value 'True' of the option 'stem'"),
        ("resnet50", {"dropout": 0.1}, UnknownName, "unknown option 'dropout' of the model 'resnet50'"),
        ("vgg19", {"batch_norm": 1}, BadOption, "'batch_norm' is 1; give true or false"),
        ("vgg16", {"hidden": "large"}, BadOption, "'hidden' is 'large'; give whole numbers"),
    ],
)
def test_options_that_cannot_be_used_are_refused(
    name: str, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        shaped(name, (3, 32, 32), **options)


@pytest.mark.parametrize(
    ("name", "options"), [("mobilenet", {"width": 0.1}), ("vgg11", {}), ("resnet18", {})]
)
def test_weights_begin_as_in_the_reference(name: str, options: dict[str, object]) -> None:
    torch.manual_seed(0)
    module = models.build(name, (3, 32, 32), 100, options)
    largest = max(
        (layer for layer in module.modules() if isinstance(layer, nn.Conv2d)), key=lambda x: x.weight.numel()
    )
    fan_out = largest.out_channels * math.prod(largest.kernel_size)
    assert largest.weight.std().item() == pytest.approx(math.sqrt(2 / fan_out), rel=0.05)
    if name != "resnet18":
        dense = next(layer for layer in module.modules() if isinstance(layer, nn.Linear))
        assert dense.weight.std().item() == pytest.approx(0.01, rel=0.05)
        assert not dense.bias.any()


def test_a_residual_block_adds_its_inputs() -> None:
    module = models.build("resnet18", (3, 9, 9), 2).eval()
    block = module.layer1[0]
    with torch.no_grad():
        block.conv2.weight.zero_()
    inputs: Tensor = torch.rand(1, 64, 3, 3)
    assert torch.equal(block(inputs), inputs)
