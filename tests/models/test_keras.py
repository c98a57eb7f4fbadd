"""Models of Keras: their files, the shape of their inputs, and training on several ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.contracts.training import Run, distance, train
from tutti import models
from tutti.comm.virtual.world import VirtualWorld
from tutti.data.parts import Part, Scale
from tutti.errors import BadModel, BadOption, UnknownName
from tutti.exports.programs import PROGRAMS
from tutti.exports.programs.base import write_program
from tutti.models.files.keras import write_keras
from tutti.records.run_folder import TrainedOn
from tutti.run.trained import PlainNetwork
from tutti.strategies import Sync
from tutti.training import of_keras
from tutti.training.precision import FP32, Arithmetic

# Of Keras, where it saves a model.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")


@pytest.fixture(scope="module")
def keras() -> Iterator[Any]:
    """Keras by torch; it brings products of matrices to 32 bits, whatever the model says."""
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patched.setenv("KERAS_BACKEND", "torch")
        keras = pytest.importorskip("keras")
        from keras.src.backend.common import dtypes

        patched.setitem(dtypes.BIT64_TO_BIT32_DTYPE, "float64", "float64")
        yield keras


def photographs(count: int = 20) -> Part:
    generator = torch.Generator().manual_seed(4)
    inputs = torch.randn(count, 2, 5, 6, generator=generator, dtype=torch.float64)
    return Part(inputs, torch.randint(0, 3, (count,), generator=generator))


def convolutions(keras: Any, shape: tuple[int | None, ...] = (5, 6, 2), *more: Any) -> Any:
    keras.utils.set_random_seed(2)
    layers = keras.layers
    return keras.Sequential(
        [keras.Input(shape), layers.Conv2D(4, 3, activation="relu"), *more, layers.Flatten(), layers.Dense(3)]
    )


def trained(ranks: int, make: Callable[[], nn.Module]) -> Any:
    def built() -> nn.Module:
        return Arithmetic("fp64").prepare(models.build(make, (2, 5, 6), 3))

    run = Run(Sync(), model=built, data=lambda: (photographs(), photographs(9)))
    return VirtualWorld(ranks).run(train, run)[0]


def test_two_ranks_train_a_model_of_keras_as_one_does(keras: Any) -> None:
    alone, both = (trained(ranks, lambda: convolutions(keras)) for ranks in (1, 2))
    assert distance(both.weights, alone.weights) < 1e-12
    begun = torch.cat([p.detach().double().reshape(-1) for p in convolutions(keras).parameters()])
    assert distance(alone.weights, begun) > 1e-3


def test_statistics_and_dropout_of_keras_are_at_work(keras: Any) -> None:
    layers = keras.layers
    model = convolutions(keras, (5, 6, 2), layers.BatchNormalization(momentum=0.5), layers.Dropout(0.5))
    inputs = photographs().inputs.float()
    evaluated = FP32.forward(model.eval(), inputs)
    assert torch.equal(evaluated, FP32.forward(model, inputs))
    training = FP32.forward(model.train(), inputs)
    assert not torch.allclose(training, FP32.forward(model, inputs))
    assert not torch.allclose(FP32.forward(model.eval(), inputs), evaluated)


def test_images_have_their_channels_where_the_model_asks_for_them(keras: Any) -> None:
    images, layers = torch.randn(2, 1, 5, 6), keras.layers
    last = images.movedim(1, 3)
    for asked, wanted in {
        (5, 6, 1): last,
        (None, None, 1): last,
        (5, 6): last.squeeze(3),
        (30,): images.flatten(1),
        (1, 5, 6): images,
    }.items():
        model = keras.Sequential([keras.Input(asked), layers.Activation("linear")])
        assert torch.equal(FP32.forward(model, images), wanted)
    own = type("Own", (keras.Model,), {"call": lambda self, inputs: inputs})()
    assert torch.equal(FP32.forward(own, images), last)
    vectors = torch.randn(2, 30)
    assert of_keras.arguments(own, vectors)[0] is vectors
    assert of_keras.arguments(own, {"a": vectors}) == {"a": vectors}
    with pytest.raises(
        BadModel, match=r"takes inputs of shape \(5, 6, 1\), but the data's have shape \(2, 5, 6\)"
    ):
        FP32.forward(convolutions(keras, (5, 6, 1)), torch.randn(2, 2, 5, 6))
    with pytest.raises(BadModel, match=r"\(30,\), but the data's have shape \(31,\); build it"):
        FP32.forward(keras.Sequential([keras.Input((30,)), layers.Dense(1)]), torch.randn(2, 31))


def test_several_inputs_are_one_argument(keras: Any) -> None:
    layers = keras.layers
    photo, angle = keras.Input((5, 6, 2), name="photo"), keras.Input((1,), name="angle")
    joined = layers.Concatenate()([layers.Flatten()(photo), angle])
    model = keras.Model([photo, angle], layers.Dense(2)(joined))
    images, angles = torch.randn(4, 2, 5, 6), torch.randn(4, 1)
    wanted = model([images.movedim(1, 3), angles])
    assert torch.equal(FP32.forward(model, (images, angles)), wanted)
    assert torch.equal(FP32.forward(model, {"angle": angles, "photo": images}), wanted)


def test_models_that_cannot_be_trained_are_refused(keras: Any) -> None:
    unbuilt = keras.Sequential([keras.layers.Dense(2)])
    with pytest.raises(BadModel, match=r"begin it with keras.Input"):
        FP32.prepare(unbuilt)
    regular = convolutions(keras, (5, 6, 2), keras.layers.Dense(2, kernel_regularizer="l2", name="heavy"))
    with pytest.raises(BadModel, match=r"add to the loss \(heavy\).*weight_decay"):
        FP32.prepare(regular)


def test_a_file_of_keras_is_a_model(keras: Any, tmp_path: Path) -> None:
    model, inputs = convolutions(keras), photographs().inputs.float()
    named = tmp_path / "net.keras"
    write_keras(model, named)
    found = models.build(str(named), (2, 5, 6), 3)
    assert torch.equal(FP32.forward(found, inputs), FP32.forward(model, inputs))
    with pytest.raises(UnknownName, match="unknown option 'width' of the model"):
        models.build(str(named), (2, 5, 6), 3, {"width": 2})
    with pytest.raises(BadOption, match=r"there is no .*none.keras; check the path"):
        models.build(str(tmp_path / "none.keras"), (2, 5, 6), 3)

    code = tmp_path / "code.keras"
    write_keras(keras.Sequential([keras.Input((3,)), keras.layers.Lambda(lambda x: x)]), code)
    broken = tmp_path / "broken.keras"
    broken.write_bytes(named.read_bytes()[:900])
    for refused in (code, broken):
        with pytest.raises(BadModel, match=f"{refused.name}' cannot be read by Keras 3.*file.py:factory"):
            models.build(str(refused), (3,), 3)


def test_keras_by_another_backend_is_refused(
    keras: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = convolutions(keras)
    write_keras(model, tmp_path / "net.keras")
    monkeypatch.setattr(keras.config, "backend", lambda: "jax")
    for refused in (model, lambda: model, str(tmp_path / "net.keras")):
        with pytest.raises(BadModel, match=r"Keras computes by jax.*set KERAS_BACKEND=torch before"):
            models.build(refused, (2, 5, 6), 3)


def test_a_trained_model_is_exported_with_its_scale(keras: Any, tmp_path: Path) -> None:
    pixels = torch.randint(0, 256, (4, 2, 5, 6), dtype=torch.uint8)
    model, scale = convolutions(keras), Scale((0.4, 0.6), (0.2, 0.3))
    data = TrainedOn("d", 3, (), (2, 5, 6), scale.mean, scale.std, 3, dtype="uint8")
    network = PlainNetwork(model, data, False).eval()
    assert PROGRAMS["keras"].input_shape(network, data.shape) == (5, 6, 2)
    off = write_program(tmp_path / "a.keras", PROGRAMS["keras"], network, {})
    assert off <= 1e-5
    found = keras.saving.load_model(tmp_path / "a.keras")(pixels.movedim(1, 3), training=False)
    wanted = FP32.forward(model.eval(), scale.apply(pixels))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    plain = PlainNetwork(nn.Flatten(), data, False).eval()
    with pytest.raises(BadModel, match="not of Keras"):
        write_program(tmp_path / "b.keras", PROGRAMS["keras"], plain, {})
    assert [path.name for path in tmp_path.iterdir()] == ["a.keras"]
