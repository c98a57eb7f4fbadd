"""A file of Keras, for a model of Keras."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from tutti.data.parts import PIXEL_MAX
from tutti.errors import BadModel
from tutti.exports.programs.base import Program
from tutti.load_object import optional_package
from tutti.models.files.keras import read_keras, write_keras
from tutti.registry import part
from tutti.training.of_keras import arguments
from tutti.training.precision import is_of_keras


@part("keras")
class KerasProgram(Program):
    """One file for keras.saving.load_model: a model of Keras, with its scale as a first layer"""

    suffix = ".keras"

    @override
    @staticmethod
    def write(path: Path, module: nn.Module, example: Tensor, facts: Mapping[str, str]) -> None:
        given: Any = module
        model: Any = getattr(given, "network", None)
        data = given.data
        if not is_of_keras(model):
            raise BadModel("a Keras file cannot hold a model that is not of Keras; write it by --to onnx")
        asked: Any = getattr(model, "inputs", None)
        if data.fill or data.preparation or (data.mean and (not asked or len(asked) != 1)):
            raise BadModel(
                "the model says no shape of a single input, before which its scale could be put, has means "
                "for missing values, or takes a prepared table; write it by --to torch-export"
            )
        if not data.mean:
            write_keras(model, path)
            return
        keras: Any = optional_package("keras", "files of Keras need", "keras")
        pairs = list(zip(data.mean, data.std, strict=True))
        factors, offsets = [1 / (PIXEL_MAX * std) for _, std in pairs], [-mean / std for mean, std in pairs]
        # With several channels, which come last in Keras.
        scale, offset = (factors, offsets) if len(pairs) > 1 else (factors[0], offsets[0])
        inputs = keras.Input(asked[0].shape[1:], name="inputs")
        scaled = keras.layers.Rescaling(scale, offset, name="scale_of_training")(inputs)
        write_keras(keras.Model(inputs, model(scaled, training=False)), path)

    @override
    @staticmethod
    def input_shape(module: nn.Module, stored: tuple[int, ...]) -> tuple[int, ...]:
        asked: Any = getattr(module.network, "inputs", None)
        return tuple(asked[0].shape[1:]) if asked else stored

    @override
    @staticmethod
    def run(path: Path, inputs: Tensor) -> Tensor:
        model: Any = read_keras(path, tuple(inputs.shape[1:]))
        given = arguments(model, inputs)
        assert isinstance(given, tuple), "a single input is an argument by position"
        with torch.no_grad():
            outputs = model(*given, training=False)
        assert isinstance(outputs, Tensor), "a model of Keras computes by torch"
        return outputs.cpu()
