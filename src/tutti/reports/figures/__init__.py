"""The figures of a report, as altair charts, from records only. A file here is a family of them.

A new figure is a new function in a file here, named by `@part` and placed on the page by `@figure`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tutti.registry import Registry

if TYPE_CHECKING:
    from tutti.reports.figures.base import Figure

FIGURES: Final[Registry[Figure]] = Registry("tutti.reports.figures", "figure")
"""By the name of the picture's file."""


def page_figures() -> dict[str, Figure]:
    """Import the figures and return them in the order of the page."""
    return dict(sorted(FIGURES.items(), key=lambda one: one[1].place))
