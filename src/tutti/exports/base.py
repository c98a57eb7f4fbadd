"""The base of the forms in which weights are exported."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import Tensor

from tutti.state import Values


@dataclass(frozen=True)
class Exported:
    """A model's weights, and its optimizer's state for them."""

    weights: dict[str, Tensor]  # parameters and buffers, as `state_dict` of the whole model gives them
    # as `get_optimizer_state_dict` of torch.distributed.checkpoint gives it; None: unknown
    optimizer: Values | None = None
    notes: tuple[str, ...] = ()  # what else a reader should know, a sentence each


class Form(ABC):
    """A form of files. The docstring of a form is its line in help texts."""

    name: ClassVar[str]  # for `--to`
    suffix: ClassVar[str]  # of the file or folder
    with_optimizer: ClassVar[bool] = False  # whether it has room for the optimizer's state

    @staticmethod
    @abstractmethod
    def fits(path: Path) -> bool:
        """Return whether a path looks like this form, damaged or not."""

    @staticmethod
    @abstractmethod
    def read(path: Path) -> Exported:
        """Read a file or folder of this form, without running code in it.

        Raises:
            BadCheckpoint: it is damaged, or of another form.
        """

    @staticmethod
    @abstractmethod
    def write(path: Path, content: Exported) -> None:
        """Write to a path where nothing exists yet, whole or not at all."""


def start_of(path: Path) -> bytes:
    """Return the first nine bytes of a file; nothing if it is not a file."""
    with suppress(OSError), open(path, "rb") as file:
        return file.read(9)
    return b""
