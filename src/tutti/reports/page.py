"""Results as one HTML file, which works offline, and as pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from tutti.errors import BadRunFolder
from tutti.load_object import require_packages
from tutti.records.files import cache_folder, replace_file
from tutti.reports.figures import page_figures
from tutti.reports.results import Results
from tutti.reports.text import by_scaling, fastest, note, table_cells, title, verdict
from tutti.terminal import wait_shown

PAGE: Final = "report.html"
PICTURES: Final = "figures"


@dataclass(frozen=True)
class Drawn:
    """A figure with its title and sentences."""

    name: str
    title: str
    chart: Any
    says: Sequence[str] = ()


def write_report(results: Results, page: Path) -> Path:
    """Write the page, as `write_page` does."""
    require_drawing()
    drawn = [
        Drawn(name, figure.title, chart, figure.says(results))
        for name, figure in page_figures().items()
        if (chart := figure.draw(results)) is not None
    ]
    return write_page(page, _words(results), drawn)


def require_drawing() -> None:
    """Raise if a package for drawing is not installed."""
    require_packages("the report needs", ["altair", "jinja2", "vl_convert"], "plots")


@wait_shown("drawing the report")
def write_page(page: Path, words: Mapping[str, Any], figures: Sequence[Drawn]) -> Path:
    """Write a page, with each figure as SVG and PNG in the folder `figures` beside it; return its path."""
    require_drawing()
    from jinja2 import Environment, StrictUndefined

    converter = _converter()
    specs = {one.name: one.chart.to_dict(validate=False) for one in figures}
    shown = [{"name": one.name, "title": one.title, "says": one.says} for one in figures]
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(files("tutti.reports").joinpath("page.html").read_text(encoding="utf-8"))
    text = template.render(**words, figures=shown, specs=specs, library=_library())
    try:
        pictures = page.parent / PICTURES
        pictures.mkdir(parents=True, exist_ok=True)
        for name, spec in specs.items():
            svg = converter.vegalite_to_svg(spec)
            (pictures / f"{name}.svg").write_text(svg, encoding="utf-8")
            (pictures / f"{name}.png").write_bytes(converter.svg_to_png(svg, scale=2))
        page.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise BadRunFolder(
            f"cannot write the report to {page}: {error.strerror}; name another place with --out"
        ) from error
    return page


@cache
def _library() -> str:
    """Return the script that draws in the browser. It is cached, as bundling takes seconds."""
    converter = _converter()
    name = f"vega-{converter.__version__}.js"
    # Without a writable home it is bundled every time.
    with suppress(OSError, RuntimeError):
        return (cache_folder() / name).read_text(encoding="utf-8")
    library = str(converter.javascript_bundle())
    with suppress(OSError, RuntimeError):
        cache_folder().mkdir(parents=True, exist_ok=True)
        replace_file(cache_folder() / name, library.encode())
    return library


def _converter() -> Any:
    """Import `vl_convert` as Any: its types have no defaults."""
    import vl_convert

    return vl_convert


def _words(results: Results) -> dict[str, Any]:
    """Return the texts of the page."""
    comparison = results.comparison
    best = fastest(results)
    tables = []
    for scaling, rows in by_scaling(results):
        kinds = ["failed" if row.error is not None else "best" if row in best else "" for row in rows]
        table = table_cells(results, rows)
        shown = [{"kind": kind, "cells": [*cells.values()]} for kind, cells in zip(kinds, table, strict=True)]
        tables.append({"title": title(comparison, scaling), "heads": [*table[0]], "rows": shown})
    return {
        "title": f"{comparison.model} on {comparison.data}",
        "verdict": verdict(results),
        "tables": tables,
        "note": note(results),
        "lists": {"How the runs went": results.courses, "The records": results.notes},
        "failures": [(row.combination.name, row.error) for row in results.rows if row.error is not None],
    }
