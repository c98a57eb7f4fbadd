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


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("comparison")
    write_comparison(folder, FAILED)
    ComparisonFolder(folder).run(FAILED, 0).write_error("rank 1 failed:\nValueError: broken")
    with pytest.MonkeyPatch.context() as patch:
        # The pictures take as long as the browser.
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
    """The open page, with errors and requests to the network."""

    def __init__(self, page: Any, file: Path) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.requests: list[str] = []
        page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_selector("body[data-drawn]", timeout=60_000)

    def drawings(self) -> dict[str, str]:
        """The SVG of every figure."""
        return {
            figure.get_attribute("id"): figure.inner_html()
            for figure in self.page.query_selector_all("figure > div")
        }


@pytest.fixture(scope="module")
def shown(browser: Any, page_file: Path) -> Iterator[Shown]:
    """The page. A test leaves the figures as they were."""
    view = {"width": 1200, "height": 900}
    context = browser.new_context(color_scheme="dark", offline=True, viewport=view)
    yield Shown(context.new_page(), page_file)
    context.close()


def test_every_figure_is_drawn_without_errors_and_without_a_network(shown: Shown, page_file: Path) -> None:
    drawings = shown.drawings()
    assert set(drawings) == set(FIGURES)
    for name, drawing in drawings.items():
        assert "mark-" in drawing, f"nothing is drawn in {name}"
    assert shown.complaints == []
    assert shown.requests == [page_file.as_uri()]


def test_a_click_on_a_legend_changes_only_its_figure_and_a_second_click_restores_it(shown: Shown) -> None:
    before = shown.drawings()
    with_legend = [name for name, drawing in before.items() if "legend-symbol" in drawing]
    assert sorted(with_legend) == sorted(set(FIGURES) - {"confusion"})
    for name in with_legend:
        for click in (1, 2):
            shown.page.locator(f"#{name} .role-legend-label text").first.click()
            shown.page.wait_for_function("name => views[name].view.runAsync().then(() => true)", arg=name)
            after = shown.drawings()
            changed = {other for other in after if after[other] != before[other]}
            assert changed == ({name} if click == 1 else set()), f"click {click} on the legend of {name}"
    assert shown.complaints == []


def test_figures_fit_a_narrow_window(browser: Any, page_file: Path) -> None:
    context = browser.new_context(offline=True, viewport={"width": 420, "height": 900})
    shown = Shown(context.new_page(), page_file)
    wide = "() => [...document.querySelectorAll('figure > div')].filter((box) => "
    wide += "box.scrollWidth > 1.25 * box.clientWidth).map((box) => box.id)"
    assert shown.page.evaluate(wide) == []
    assert shown.complaints == []
    context.close()
