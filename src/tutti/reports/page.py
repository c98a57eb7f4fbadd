"""A comparison as one HTML file, which can be read offline and sent to others, and as pictures."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tutti.comparisons import SCALINGS, Combination, Comparison
from tutti.errors import BadRunFolder, UserError
from tutti.reports.advice import advice, measuring_share, stages_by_rank
from tutti.reports.runs import Run
from tutti.reports.scaling import Row, finished_runs, rows
from tutti.reports.text import NOTE, cells, heads, title

PAGE: Final = "report.html"
PICTURES: Final = "figures"

_HEAD: Final = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; --ink: #1c1c1c; --paper: #ffffff; --line: #d0d0d0; --bad: #b00020; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: #e6e6e6; --paper: #16181c; --line: #3a3d44; --bad: #ff7b8a; }}
}}
body {{ color: var(--ink); background: var(--paper); font: 15px/1.5 system-ui, sans-serif;
  max-width: 1100px; margin: 2rem auto; padding: 0 1rem; }}
table {{ border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }}
caption {{ text-align: left; font-weight: 600; padding: .3rem 0; }}
th, td {{ padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: right; }}
th:first-child, td:first-child {{ text-align: left; white-space: nowrap; }}
tr.failed td, p.failed {{ color: var(--bad); }}
figure {{ margin: 2rem 0; overflow-x: auto; }}
figcaption {{ font-weight: 600; margin-bottom: .5rem; }}
</style>
</head>
<body>
"""

_DRAW: Final = """
const dark = window.matchMedia("(prefers-color-scheme: dark)");
async function draw() {
  for (const [name, spec] of Object.entries(figures)) {
    const options = { actions: false, renderer: "svg", theme: dark.matches ? "dark" : undefined };
    await vegaEmbed("#" + name, { ...spec, background: "transparent" }, options);
  }
  document.body.dataset.drawn = dark.matches ? "dark" : "light";
}
dark.addEventListener("change", draw);
draw();
"""


def write_report(comparison: Comparison, folder: Path) -> Path:
    """Write `report.html`, and each figure as SVG and PNG, into a comparison's folder.

    Args:
        comparison: what was compared.
        folder: where its runs are.

    Returns:
        The page.

    Raises:
        UserError: the packages that draw are not installed.
        BadRunFolder: the runs cannot be read, or the folder cannot be written.
    """
    try:
        import vl_convert

        from tutti.reports.figures import FIGURES, Results
    except ImportError as error:
        raise UserError(
            f"the report needs {error.name}, which is not installed; pip install 'tutti[plots]'"
        ) from error
    found = rows(comparison, folder)
    runs = {one.folder: finished_runs(comparison, folder, one) for one in comparison.combinations}
    results = Results(comparison, found, runs)
    charts = {name: (head, draw(results)) for name, (head, draw) in FIGURES.items()}
    specs = {name: (head, chart.to_dict()) for name, (head, chart) in charts.items() if chart is not None}
    advised = [line for one in comparison.combinations for line in _advice(comparison, one, runs[one.folder])]
    try:
        for name, (_, spec) in specs.items():
            _write_pictures(vl_convert, folder / PICTURES / name, spec)
        converter: Any = vl_convert  # Its types demand arguments that have defaults.
        script = converter.javascript_bundle()
        page = folder / PAGE
        page.write_text("".join(_page(comparison, found, specs, script, advised)), encoding="utf-8")
    except OSError as error:
        raise BadRunFolder(
            f"cannot write the report into {folder}: {error.strerror}; give a folder that you may write"
        ) from error
    return page


def _write_pictures(vl_convert: Any, path: Path, spec: dict[str, Any]) -> None:
    path.parent.mkdir(exist_ok=True)
    path.with_suffix(".svg").write_text(vl_convert.vegalite_to_svg(spec), encoding="utf-8")
    path.with_suffix(".png").write_bytes(vl_convert.vegalite_to_png(spec, scale=2))


def _advice(comparison: Comparison, one: Combination, runs: Sequence[Run]) -> Iterator[str]:
    """Where the time of a combination's runs went, and what to try."""
    ranks = stages_by_rank([record for run in runs for record in run.history])
    if ranks:
        config = {**comparison.config, **one.options, "strategy": one.strategy}
        every = {key[9:]: value for key, value in one.options.items() if key.startswith("strategy.")}
        config["strategy_options"] = {**(config.get("strategy_options") or {}), **every}
        yield f"{one.name}: {advice(ranks, config)}; measuring took {measuring_share(ranks):.2%}"


def _page(
    comparison: Comparison,
    found: Sequence[Row],
    specs: dict[str, tuple[str, dict[str, Any]]],
    script: str,
    advised: Sequence[str],
) -> Iterator[str]:
    """The page, piece by piece."""
    name = f"{comparison.model} on {comparison.data}"
    yield _HEAD.format(title=html.escape(name))
    yield f"<h1>{html.escape(name)}</h1>\n"
    for scaling in SCALINGS:
        of = [row for row in found if row.combination.scaling == scaling]
        if of:
            yield from _table(comparison, of, scaling)
    yield f"<p>{html.escape(NOTE)}</p>\n"
    for row in found:
        if row.error is not None:
            text = html.escape(f"{row.combination.name} failed: {row.error}")
            yield f'<p class="failed"><code>{text}</code></p>\n'
    if advised:
        yield "<h2>Where the time went</h2>\n<ul>\n"
        yield "".join(f"<li>{html.escape(line)}</li>\n" for line in advised) + "</ul>\n"
    for figure, (head, _) in specs.items():
        yield f"<figure><figcaption>{html.escape(head)}</figcaption>"
        yield f'<div id="{figure}"></div></figure>\n'
    # Inside a script only its own end tag would end it.
    data = json.dumps({figure: spec for figure, (_, spec) in specs.items()}).replace("</", "<\\/")
    yield f"<script>{script}</script>\n"
    yield f"<script>const figures = {data};{_DRAW}</script>\n</body>\n</html>\n"


def _table(comparison: Comparison, found: Sequence[Row], scaling: str) -> Iterator[str]:
    yield f"<table><caption>{html.escape(title(comparison, scaling))}</caption>\n<tr>"
    yield "".join(f"<th>{html.escape(head)}</th>" for head in heads(comparison)) + "</tr>\n"
    for row in found:
        kind = ' class="failed"' if row.error is not None else ""
        yield f"<tr{kind}>"
        yield "".join(f"<td>{html.escape(cell)}</td>" for cell in cells(comparison, row)) + "</tr>\n"
    yield "</table>\n"
