"""Programs made by tracing a model: of ONNX, which many other programs run, and of torch.export."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from tutti.exports.programs.base import Program
from tutti.load_object import optional_package
from tutti.registry import part

INPUTS = "inputs"
OUTPUTS = "outputs"


@part("onnx")
class OnnxProgram(Program):
    """One file for onnxruntime and others: the whole model with its scale: pip install 'tutti[export]'"""

    suffix = ".onnx"

    @override
    @staticmethod
    def write(path: Path, module: nn.Module, example: Tensor, facts: Mapping[str, str]) -> None:
        program = torch.onnx.export(
            module,
            (example,),
            dynamo=True,
            verbose=False,
            input_names=[INPUTS],
            output_names=[OUTPUTS],
            dynamic_shapes=({0: torch.export.Dim("samples")},),
        )
        assert program is not None
        program.model.metadata_props.update(facts)
        program.save(path, external_data=False)

    @override
    @staticmethod
    def run(path: Path, inputs: Tensor) -> Tensor:
        runtime = optional_package("onnxruntime", "ONNX files need", "export")
        session = runtime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
        (outputs,) = session.run([OUTPUTS], {INPUTS: inputs.numpy()})
        return torch.from_numpy(outputs)


@part("torch-export")
class TorchProgram(Program):
    """One file for torch.export.load: the whole model with its scale; it runs without the model's code"""

    suffix = ".pt2"

    @override
    @staticmethod
    def write(path: Path, module: nn.Module, example: Tensor, facts: Mapping[str, str]) -> None:
        samples = torch.export.Dim("samples")
        program = torch.export.export(module, (example,), dynamic_shapes=({0: samples},))
        buffer = io.BytesIO()  # torch's own writer ends the process when the disk is full.
        torch.export.save(program, buffer, extra_files=dict(facts))
        path.write_bytes(buffer.getbuffer())

    @override
    @staticmethod
    def run(path: Path, inputs: Tensor) -> Tensor:
        with open(path, "rb") as file:
            program = torch.export.load(file)
        with torch.no_grad():
            return cast("Tensor", program.module()(inputs))
