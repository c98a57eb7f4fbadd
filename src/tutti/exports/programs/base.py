"""The base of programs that models are exported as, and the check that they compute the same."""

from __future__ import annotations

import logging
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import ClassVar, Final

import torch
from torch import Tensor, nn

from tutti.errors import BadModel, TuttiError
from tutti.records.texts import printable

CLOSE: Final = 1e-5
"""The largest allowed difference of a program from its model, in units of the largest output or of 1."""

BATCHES: Final = (2, 1, 5)
"""The numbers of samples for the comparison; the program is traced with the first."""


class Program(ABC):
    """A kind of program. The docstring of a kind is its line in help texts."""

    name: ClassVar[str]  # for `--to`
    suffix: ClassVar[str]  # of the file

    @staticmethod
    @abstractmethod
    def write(path: Path, module: nn.Module, example: Tensor, facts: Mapping[str, str]) -> None:
        """Write a model, in evaluation mode, as a program for any number of samples.

        `example` are inputs of some samples; `facts` are kept with the program.
        """

    @staticmethod
    def input_shape(module: nn.Module, stored: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of one input of the program; `stored` is the shape of the data as stored."""
        return stored

    @staticmethod
    @abstractmethod
    def run(path: Path, inputs: Tensor) -> Tensor:
        """Return the outputs of a program."""


def write_program(path: Path, kind: type[Program], module: nn.Module, facts: Mapping[str, str]) -> float:
    """Write a model as a program to a new path, and check that it computes the same.

    Return the largest difference of the outputs, in units of the largest one or of 1. `module` has
    `example(samples)`, which makes inputs. BadModel: the program computes something else, or cannot be made.
    """
    examples = [module.example(samples) for samples in BATCHES]  # type: ignore[operator]
    # Some formats depend on the suffix.
    unfinished, largest = path.with_name(f".{path.name}.unfinished{kind.suffix}"), 0.0
    try:
        with torch.no_grad():
            wanted = [module(one.clone()) for one in examples]
        try:
            with quiet():
                kind.write(unfinished, module, examples[0], facts)
            outputs = [kind.run(unfinished, one) for one in examples]
        except (TuttiError, OSError):
            raise
        except Exception as error:  # Tracers raise anything.
            raise BadModel(
                f"the model cannot be written as '{kind.name}' ({_reason(error)}); write its weights "
                "instead, by --to safetensors or --to torch"
            ) from error
        for one, other in zip(outputs, wanted, strict=True):
            if one.shape != other.shape:
                raise _other(kind, f"outputs of shape {tuple(one.shape)} instead of {tuple(other.shape)}")
            off = (one - other).abs().max() / max(1.0, float(other.abs().max()))
            largest = max(largest, float(off))
            if not off <= CLOSE:
                raise _other(kind, f"outputs that are off by {float(off):.2g}")
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
    return largest


@contextmanager
def quiet() -> Iterator[None]:
    """Silence what tracers print about missing or unused parts."""
    level = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _reason(error: BaseException) -> str:
    """Return in one line why a tracer failed: torch's tracers hide the first error behind advice."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode  # Imports sympy.

    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, GuardOnDataDependentSymNode):
        return "it chooses what to compute by the values of its inputs, and a program has one way"
    message = printable(str(error).strip().partition("\n")[0][:300])
    return f"{type(error).__name__}: {message}"


def _other(kind: type[Program], what: str) -> BadModel:
    return BadModel(
        f"the model, written as '{kind.name}', gives {what}, so it was not kept; a model whose computation "
        "depends on the inputs or on the number of samples cannot be traced: write its weights instead, by "
        "--to safetensors"
    )
