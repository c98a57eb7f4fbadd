"""Whole models as programs, which run without the code of the model: one file here for each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tutti.load_object import require_packages
from tutti.registry import Registry

if TYPE_CHECKING:
    from tutti.exports.programs.base import Program

PROGRAMS: Final[Registry[type[Program]]] = Registry("tutti.exports.programs", "form")
"""The kinds of programs by name."""

_NEEDS: Final = {"onnx": ("export", "onnx", "onnxscript", "onnxruntime"), "keras": ("keras", "keras")}
"""The extra that a kind needs, and its packages."""


def require_program(name: str) -> None:
    """Refuse to write a program if a package that it needs is not installed."""
    extra, *packages = _NEEDS.get(name, ("",))
    require_packages(f"--to {name} needs", packages, extra)
