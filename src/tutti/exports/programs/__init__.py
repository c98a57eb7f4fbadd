"""Whole models as programs, which run without the code of the model: a file here for each kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tutti.registry import Registry

if TYPE_CHECKING:
    from tutti.exports.programs.base import Program

PROGRAMS: Final[Registry[type[Program]]] = Registry("tutti.exports.programs", "form")
"""The kinds of programs by name."""
