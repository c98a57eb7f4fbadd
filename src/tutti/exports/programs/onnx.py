"""A program in ONNX, which many other programs run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

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
    def check() -> None:
        for name in ("onnx", "onnxscript", "onnxruntime"):
            optional_package(name, "ONNX files", "export")

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
        runtime = optional_package("onnxruntime", "ONNX files", "export")
        session = runtime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
        (outputs,) = session.run([OUTPUTS], {INPUTS: inputs.numpy()})
        return torch.from_numpy(outputs)
