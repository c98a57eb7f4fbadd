"""Weights in one file: of safetensors, or of `torch.save`."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from typing_extensions import override

from tutti.errors import BadCheckpoint, BadRunFolder
from tutti.exports.base import Exported, Form, start_of
from tutti.records.files import replace_file
from tutti.registry import part
from tutti.training.weights import read_weights, weights_to_bytes


@part("safetensors")
class SafetensorsForm(Form):
    """One file for safetensors.torch.load_file: the weights"""

    suffix = ".safetensors"

    @override
    @staticmethod
    def fits(path: Path) -> bool:
        return start_of(path)[8:] == b"{"

    @override
    @staticmethod
    def read(path: Path) -> Exported:
        try:
            return Exported(read_weights(path))
        except BadRunFolder as error:
            raise BadCheckpoint(f"{path} is damaged, or no file of safetensors; save it again") from error

    @override
    @staticmethod
    def write(path: Path, content: Exported) -> None:
        replace_file(path, weights_to_bytes(content.weights))


@part("torch")
class TorchForm(Form):
    """One file for torch.load(..., weights_only=True): the weights as a state dictionary"""

    suffix = ".pt"

    @override
    @staticmethod
    def fits(path: Path) -> bool:
        return start_of(path).startswith((b"PK", b"\x80"))

    @override
    @staticmethod
    def read(path: Path) -> Exported:
        try:
            content = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # A foreign pickle raises anything.
            raise BadCheckpoint(
                f"{path} is damaged, or not what torch.save writes ({type(error).__name__}: {error}); save "
                "it again, as a state dictionary"
            ) from error
        if isinstance(content, Mapping):
            content = next((content[name] for name in ("model", "state_dict") if name in content), content)
        if not isinstance(content, Mapping) or not all(isinstance(x, Tensor) for x in content.values()):
            raise BadCheckpoint(
                f"{path} is no state dictionary; save one with torch.save(model.state_dict(), path)"
            )
        return Exported({str(name): value.detach() for name, value in content.items()})

    @override
    @staticmethod
    def write(path: Path, content: Exported) -> None:
        # A view would be saved with its base. Tied weights stay tied.
        copies = {id(x): x.detach().clone() for x in content.weights.values()}
        buffer = io.BytesIO()
        torch.save({name: copies[id(x)] for name, x in content.weights.items()}, buffer)
        replace_file(path, buffer.getvalue())
