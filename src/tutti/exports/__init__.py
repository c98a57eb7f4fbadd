"""Weights in files of other programs, and back: one file here for each form. Needs no torch itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tutti.registry import Registry

if TYPE_CHECKING:
    from tutti.exports.base import Form

FORMS: Final[Registry[type[Form]]] = Registry("tutti.exports", "form")
"""The forms by name."""
