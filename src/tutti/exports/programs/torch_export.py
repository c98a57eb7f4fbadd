"""A program of torch.export, which torch runs without the code of the model."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from tutti.exports.programs.base import Program
from tutti.registry import part


@part("torch-export")
class TorchProgram(Program):
    """One file for torch.export.load: the whole model with its scale; it runs without the model's code"""

    suffix = ".pt2"

    @override
    @staticmethod
    def check() -> None:
        return

    @override
    @staticmethod
    def write(path: Path, module: nn.Module, example: Tensor, facts: Mapping[str, str]) -> None:
        samples = torch.export.Dim("samples")
        program = torch.export.export(module, (example,), dynamic_shapes=({0: samples},))
        buffer = io.BytesIO()  # Of a disk that becomes full torch's writer ends the process.
        torch.export.save(program, buffer, extra_files=dict(facts))
        path.write_bytes(buffer.getbuffer())

    @override
    @staticmethod
    def run(path: Path, inputs: Tensor) -> Tensor:
        with open(path, "rb") as file:
            program = torch.export.load(file)
        with torch.no_grad():
            return cast("Tensor", program.module()(inputs))
