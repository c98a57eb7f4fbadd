"""Programs of torch.export.

A program has no modes: its graph fixes what its layers do in training, or do not. Here the places where
it does so ask the module instead, as they did before the export.

    dropout(x, 0.5, False)                         dropout(x, 0.5, self.training)
    scaled_dot_product_attention(q, k, v, p)       scaled_dot_product_attention(q, k, v, self.training * p)
"""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Any, Final

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from tutti.errors import BadModel
from tutti.registry import part

FLAGS: Final = ("train", "training")
"""Names of operators' arguments that say whether the model is training."""

PROBABILITIES: Final = ("dropout_p",)
"""Names of the arguments that are 0 unless it is."""


@part(".pt2")
def read_program(path: Path, shape: object) -> nn.Module:
    """Read a program of torch.export as a module that can be trained.

    Its file runs code when it is read: it may hold pickles.

    Args:
        path: of the file.
        shape: of one input, for which the program is tried before training.

    Raises:
        BadModel: the file holds no program, or one for a fixed number of samples.
    """
    try:
        program = torch.export.load(path)
    except Exception as error:  # a file may break torch in any way
        raise BadModel(
            f"the model '{path}' cannot be read: {type(error).__name__}: {error}; write it by "
            "torch.export.save(program, path)"
        ) from error
    _refuse_fixed_batches(path, program)
    module = program.module()
    _check_nothing(module)
    follow_mode(module)
    return module


def follow_mode(module: Any) -> None:
    """Make the module of a program, from `ExportedProgram.module`, follow `train` and `eval`, in place."""
    # The program's own `train` and `eval` raise errors.
    for method in ("train", "eval"):
        vars(module).pop(method, None)
    _ask_for_mode(module)
    module.recompile()


def _refuse_fixed_batches(path: Path, program: ExportedProgram) -> None:
    names = {one.arg.name for one in program.graph_signature.input_specs if one.kind is InputKind.USER_INPUT}
    for node in program.graph.find_nodes(op="placeholder"):
        if node.name in names and isinstance(node.meta["val"].shape[0], int):
            raise BadModel(
                f"the model '{path}' takes batches of exactly {node.meta['val'].shape[0]} samples, as it was "
                "exported so, and training makes batches of several sizes; export it with dynamic_shapes={"
                f"'{node.name}': {{0: torch.export.Dim('samples')}}}}"
            )


def _check_nothing(module: fx.GraphModule) -> None:
    """Take out the checks of the inputs' shapes, which have been made once."""
    for node in list(module.graph.find_nodes(op="call_module", target="_guards_fn")):
        module.graph.erase_node(node)
    module.delete_submodule("_guards_fn")
    module._forward_pre_hooks.clear()


def _ask_for_mode(module: fx.GraphModule) -> None:
    """Make the operators that differ in training follow the mode of the module."""
    graph = module.graph
    for node in [node for node in graph.nodes if node.op == "call_function"]:
        schema = getattr(node.target, "_schema", None)
        for place, argument in enumerate(schema.arguments if schema is not None else ()):
            given = _given(node, place, argument.name)
            if argument.name not in FLAGS and not (argument.name in PROBABILITIES and given):
                continue
            with graph.inserting_before(node):
                mode = graph.create_node("get_attr", "training")
                if argument.name in PROBABILITIES:
                    mode = graph.call_function(operator.mul, (mode, given))
            _set(node, place, argument.name, mode)


def _given(node: fx.Node, place: int, name: str) -> Any:
    return node.args[place] if place < len(node.args) else node.kwargs.get(name)


def _set(node: fx.Node, place: int, name: str, value: fx.Node) -> None:
    if place < len(node.args):
        node.update_arg(place, value)
    else:
        node.update_kwarg(name, value)
