"""The page in a real browser, without a network: everything is drawn, can be clicked and can be read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reports.recorded_comparison import leave_pictures_out, write_comparison
from tutti.records.comparison import STRONG, Combination, ComparisonFolder
from tutti.reports.figures import FIGURES
from tutti.reports.page import PAGE, write_report
from tutti.reports.results import read_comparison

playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install '.[browser]'")

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no browser here: apt-get install chromium")

FAILED = Combination("easgd, 2 workers", "easgd", "easgd", 2, 1, STRONG)

NOT_DRAWN = {"speed-up"}
"""Figures of runs that were made one by one, and of a run that is alone on its page."""

LEGIBLE = 4.5
"""The smallest contrast of text that the Web Content Accessibility Guidelines (1.4.3, AA) allow."""


DIGESTS = """() => Object.fromEntries([...document.querySelectorAll("figure > div")].map((figure) => {
  const text = figure.innerHTML;
  let sum = 0;
  for (let at = 0; at < text.length; at++) sum = (Math.imul(sum, 31) + text.charCodeAt(at)) | 0;
  return [figure.id, [text.length, sum]];
}))"""
"""By figure, its length and a hash of it."""


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    write_comparison(folder, FAILED)
    ComparisonFolder(folder).write_error(FAILED, 0, "rank 1 failed:\nValueError: broken")
    with pytest.MonkeyPatch.context() as patch:
        # The pictures beside the page take as long as the browser does.
        leave_pictures_out(patch)
        return write_report(read_comparison(folder), folder / PAGE)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # Root has no sandbox.
        args = ["--no-sandbox", "--disable-gpu", "--disable-software-rasterizer", "--no-zygote"]
        found = driver.chromium.launch(executable_path=BROWSER, args=args)
        yield found
        found.close()


class Shown:
    """The page, open in the browser, with all that it complained of and asked the network for."""

    def __init__(self, page: Any, file: Path) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_selector("body[data-drawn]", timeout=60_000)

    def digests(self) -> dict[str, list[int]]:
        """Of every figure's SVG a sum: to fetch them all takes a second."""
        found: dict[str, list[int]] = self.page.evaluate(DIGESTS)
        return found

    def drawings(self) -> dict[str, str]:
        """The SVG of every figure."""
        return {
            figure.get_attribute("id"): figure.inner_html()
            for figure in self.page.query_selector_all("figure > div")
        }


def show(browser: Any, file: Path, theme: str) -> Shown:
    context = browser.new_context(color_scheme=theme, offline=True, viewport={"width": 1200, "height": 900})
    return Shown(context.new_page(), file)


@pytest.fixture(scope="module")
def pages(browser: Any, page_file: Path) -> Iterator[dict[str, Shown]]:
    """One page for each theme: opening one takes seconds. A test leaves the figures as they were."""
    found = {theme: show(browser, page_file, theme) for theme in ("light", "dark")}
    yield found
    for shown in found.values():
        shown.page.context.close()


@pytest.fixture(params=["light", "dark"])
def shown(pages: dict[str, Shown], request: pytest.FixtureRequest) -> Shown:
    return pages[request.param]


@pytest.fixture
def light(pages: dict[str, Shown]) -> Shown:
    return pages["light"]


def test_every_figure_is_drawn_without_a_complaint_and_without_a_network(
    shown: Shown, page_file: Path
) -> None:
    drawings = shown.drawings()
    assert set(drawings) == set(FIGURES) - NOT_DRAWN
    for name, drawing in drawings.items():
        assert "mark-" in drawing, f"nothing is drawn in {name}"
    assert shown.complaints == []
    assert shown.requests == [page_file.as_uri()]


def test_a_click_on_a_legend_changes_its_figure_alone_and_a_second_one_changes_it_back(
    light: Shown,
) -> None:
    with_legend = [name for name, drawing in light.drawings().items() if "legend-symbol" in drawing]
    assert sorted(with_legend) == sorted(set(FIGURES) - NOT_DRAWN - {"confusion"})
    before = light.digests()
    for name in with_legend:
        for click in (1, 2):
            light.page.locator(f"#{name} .role-legend-label text").first.click()
            light.page.wait_for_function("name => views[name].view.runAsync().then(() => true)", arg=name)
            after = light.digests()
            changed = {other for other in after if after[other] != before[other]}
            assert changed == ({name} if click == 1 else set()), f"click {click} on the legend of {name}"
    assert light.complaints == []
