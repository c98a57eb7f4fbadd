"""A file of safetensors: weights by name, without code."""

from __future__ import annotations

from pathlib import Path

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
