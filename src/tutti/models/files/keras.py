"""Models of Keras 3, which compute by torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

from torch import nn

from tutti.errors import BadModel
from tutti.load_object import optional_package
from tutti.registry import part


@part(".keras")
def read_keras(path: Path, shape: object) -> nn.Module:
    """Read a model that Keras has saved, with its weights.

    Args:
        path: of the file.
        shape: of one input; not used, as the model itself knows.

    Raises:
        BadModel: the file holds no model that Keras can make with torch and without the user's code.
        BadOption: Keras is not installed.
    """
    os.environ.setdefault("KERAS_BACKEND", "torch")
    keras: Any = optional_package("keras", "files of Keras need", "keras")
    refuse_other_backend(keras.config.backend())
    try:
        model = keras.saving.load_model(path, compile=False)
    except Exception as error:  # a file may break Keras in any way
        message, _, _ = str(error).strip().partition("\n")
        raise BadModel(
            f"the model '{path}' cannot be read by Keras {keras.__version__}: {message}; if it needs "
            "your own classes, name a function that loads it with them: file.py:factory"
        ) from error
    return cast("nn.Module", model)


def refuse_other_backend(backend: str) -> None:
    """Refuse models of Keras with another backend than torch."""
    if backend != "torch":
        raise BadModel(
            f"Keras computes by {backend} in this process, and tutti trains by torch; set "
            "KERAS_BACKEND=torch before Keras is imported"
        )


def write_keras(model: nn.Module, path: Path) -> None:
    """Write a model of Keras to a file ending in .keras, with its weights."""
    cast("Any", model).save(path)
