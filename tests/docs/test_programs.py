"""Every program that a page shows is Python, and what it uses of tutti is there; the small ones are run."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.io
import torch
from torch import nn

import tutti
from tests.docs.programs import DOCS, blocks_of
from tutti.errors import BadData
from tutti.models import build
from tutti.run.api import TrainOptions
from tutti.run.config import TrainConfig
from tutti.training.augmentations import SampleRandom
from tutti.training.sample_words import keys_of

PROGRAMS = [
    pytest.param(block.code, id=f"{page}-{number}")
    for page in sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))
    for number, block in enumerate(blocks_of(page))
    if block.language == "python" and block.mark != "theirs"
]


def dotted(node: ast.expr) -> str | None:
    """The name that an expression is, such as `tutti.train`."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else None
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else None


def of_tutti(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """The modules of tutti and the names in them that a program uses."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "tutti":
            yield from ((str(node.module), alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute) and dotted(node.value) == "tutti":
            yield "tutti", node.attr


def unknown_arguments(call: ast.Call, function: Any) -> list[str]:
    """The keywords of a call that the function does not take."""
    parameters = inspect.signature(function).parameters
    known = set(parameters)
    if function in (tutti.train, tutti.cross_validate, tutti.tune):
        known |= {field.name for field in fields(TrainConfig)} | set(TrainOptions.__annotations__)
    elif any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []
    return [word.arg for word in call.keywords if word.arg is not None and word.arg not in known]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_of_a_page_is_python_and_uses_what_tutti_has(program: str) -> None:
    tree = ast.parse(program)
    for module, name in of_tutti(tree):
        assert hasattr(import_module(module), name), f"{module} has no {name}"
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        module, _, name = (dotted(call.func) or "").rpartition(".")
        if module == "tutti":
            assert unknown_arguments(call, getattr(tutti, name)) == []


def test_a_wrong_argument_would_be_seen() -> None:
    (call,) = (n for n in ast.walk(ast.parse("tutti.train('mlp', epohcs=1)")) if isinstance(n, ast.Call))
    assert unknown_arguments(call, tutti.train) == ["epohcs"]


def only(page: str, beginning: str) -> str:
    """The one program of a page with these words."""
    (code,) = [
        block.code for block in blocks_of(page) if block.language == "python" and beginning in block.code
    ]
    return code


def test_the_callback_of_the_page_stops_a_run() -> None:
    names: dict[str, Any] = {}
    program = only("watching.md", "class Gap").replace('"digits", ', '"digits", workers=1, epochs=2, ')
    exec(compile(program.replace("most=2", "most=0"), "page", "exec"), names)
    assert len(names["gap"].gaps) == 1
    assert "the losses are" in names["result"].summary.ended_early


def test_the_transform_of_the_page_changes_each_sample_in_its_own_way() -> None:
    names: dict[str, Any] = {}
    exec(compile(only("augmentation.md", "def jitter"), "page", "exec"), names)
    random = SampleRandom(keys_of(torch.arange(3), seed=0, epoch=0, use=1), torch.device("cpu"))
    inputs, targets = names["jitter"](torch.zeros(3, 1, 4, 4), torch.arange(3), random)
    assert torch.equal(targets, torch.arange(3))
    assert len({tuple(sample.flatten().tolist()) for sample in inputs}) == 3
    assert 0 <= inputs.min() < inputs.max() < 0.1


def test_the_model_of_the_page_fits_itself_to_the_data() -> None:
    names: dict[str, Any] = {}
    exec(compile(only("adding-parts.md", "def perceptron"), "page", "exec"), names)
    model = build(names["perceptron"], (1, 8, 8), 10, {"hidden": 5})
    assert model(torch.zeros(3, 1, 8, 8)).shape == (3, 10)


def test_the_format_of_the_page_reads_its_files_and_names_what_is_there(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(compile(only("adding-parts.md", "class Matlab"), "page", "exec"), names)
    form, path = names["Matlab"], tmp_path / "jets.mat"
    scipy.io.savemat(path, {"x": np.ones((4, 3)), "kind": np.arange(4)})
    assert path.read_bytes().startswith(form.start)
    inputs, targets = form.read(path, targets="kind").parts["train"]
    assert (inputs.shape, targets.tolist()) == ((4, 3), [0, 1, 2, 3])
    with pytest.raises(BadData, match=r"has no array 'y'; give --data\.inputs and --data\.targets: x, kind"):
        form.read(path)


def test_the_program_of_torch_export_writes_one_that_takes_any_number_of_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = {"torch": torch, "model": nn.Linear(3, 2), "inputs": torch.zeros(4, 3)}
    exec(compile(only("models.md", "torch.export.save"), "page", "exec"), names)
    loaded = torch.export.load("net.pt2").module()
    assert loaded(torch.zeros(7, 3)).shape == (7, 2)


def test_a_trained_run_answers_as_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tutti.train("mlp", "digits", workers=1, epochs=1, out="runs/NAME", quiet=True)
    images = np.zeros((3, 8, 8), np.uint8)
    names: dict[str, Any] = {"images": images, "torch": torch}
    exec(compile(only("after-training.md", "tutti.load("), "page", "exec"), names)
    assert names["classes"].shape == (3,)
    np.testing.assert_allclose(names["chances"].sum(1), 1, rtol=1e-6)
    assert names["logits"].shape == (3, 10)
