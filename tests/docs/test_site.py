"""The documentation site has what it promises: every page, link, public name, option and equation."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

pytest.importorskip("sphinx")

from website import contents, options, reference, strategies
from website.docstrings import to_rst
from website.equations import latex, lines
from website.paths import ROOT, SITE_OF, DeadLink, SiteMap, page_of_file

from tutti import errors
from tutti.cli.commands import COMMANDS
from tutti.strategies import STRATEGIES

PAGES = [f"docs/{page}" for page in contents.pages_of_docs()] + [
    path for path in SITE_OF if path != "README.md"
]


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_somewhere_on_the_site(page: str) -> None:
    assert SiteMap(strategies.files() | reference.FILES).rewrite(
        (ROOT / page).read_text(encoding="utf-8"), page
    )


def test_a_link_to_nothing_is_an_error_that_names_both() -> None:
    with pytest.raises(DeadLink, match=r"docs/data\.md links to other\.md, but there is no docs/other\.md"):
        SiteMap({}).rewrite("[a](other.md)", "docs/data.md")


def test_links_follow_their_files_to_the_site() -> None:
    site = SiteMap({"src/tutti/strategies/sync.py": "strategies/sync.md"})
    text = "[a](../benchmarks/RESULTS.md#data) [b](../src/tutti/strategies/sync.py) [c](models.md)"
    assert site.rewrite(text, "docs/data.md") == (
        "[a](performance.md#data) [b](strategies/sync.md) [c](models.md)"
    )
    blocks = "\n```\na\n```\n\n[a](../benchmarks/RESULTS.md)\n\n```\nb\n```\n"
    assert "(performance.md)" in site.rewrite(blocks, "docs/data.md"), "a link between two blocks of code"
    assert site.rewrite("[d](../Makefile)", "docs/data.md") == "[d](files/Makefile.md)"
    assert "make train" in page_of_file("Makefile")


def test_every_page_is_in_the_table_of_contents() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    found = contents.sections(index, contents.pages_of_docs())
    listed = {re.sub(r".*<(.*)>", r"\1", entry) for entries in found.values() for entry in entries}
    assert listed == {page.removesuffix(".md") for page in contents.pages_of_docs()} - {"README"}


def test_a_folder_is_a_section_and_what_is_not_listed_is_under_more() -> None:
    found = contents.sections(
        "## One\n\n- [A](a.md): first\n- [Web](https://x.org/b.md)\n",
        ["README.md", "a.md", "b.md", "lessons/c.md"],
    )
    assert found == {"One": ["A <a>"], "More": ["b"], "Lessons": ["lessons/c"]}


PUBLIC = [
    f"{module}.{name}" for module in reference.public_modules() for name in import_module(module).__all__
]


def test_every_public_name_has_an_entry() -> None:
    pages = reference.pages()
    text = "".join(page.text() for page in pages)
    listed = {name for page in pages for name in page.names}
    for name in PUBLIC:
        module, _, attribute = name.rpartition(".")
        value = getattr(import_module(module), attribute)
        same = [one for one in PUBLIC if one.endswith(f".{attribute}") and one in listed]
        assert same, f"{name} has no entry"
        assert any(getattr(import_module(one.rpartition(".")[0]), attribute) is value for one in same)
        assert f":: {same[0]}\n" in text


def test_every_file_of_a_folder_is_on_the_page_of_files() -> None:
    page = reference.files_page()
    for name in reference.FOLDERS.values():
        module = import_module(f"tutti.records.{name}")
        listed = [file for kind in ("RECORDS", "LINES") for file in getattr(module, kind, {}).values()]
        own = [
            value
            for key, value in vars(module).items()
            if key.isupper() and re.match(r"\S+\.\w+$", str(value))
        ]
        for file in [*listed, *own]:
            assert file in page, file


def test_the_page_of_exit_codes_has_those_of_the_errors() -> None:
    code = ""
    lines = re.findall(r"^[│├└─ ]*([A-Z]\w+) {2,}(\d+)?", reference.exit_codes_page(), re.MULTILINE)
    assert len(lines) == 14
    for name, own in lines:
        code = own or code
        assert str(getattr(errors, name).exit_code) == code, name


@pytest.mark.parametrize("name", list(COMMANDS))
def test_every_option_of_a_command_is_on_its_page(name: str) -> None:
    page = options.command_page(name)
    for flag in COMMANDS[name]().parser().flags():
        if flag not in ("-h", "--help"):
            assert re.search(rf"`[^`]*{flag}\b", page), flag


@pytest.mark.parametrize("name", list(STRATEGIES))
def test_a_strategy_s_docstring_has_an_equation_that_can_be_set_and_a_drawing(name: str) -> None:
    blocks = strategies.blocks(STRATEGIES[name])
    formulas = [
        piece
        for block in blocks["equation"]
        for line in lines(block, strategies.option_names(STRATEGIES[name]))
        for piece in line.pieces
        if piece.formula
    ]
    assert formulas
    assert blocks["drawing"] or name == "solo"


def test_equations_are_set_as_one_reads_them() -> None:
    assert latex("x_i = 1/n sum over j of x_j") == r"x_{i} = \frac{1}{n}\, \sum_{j} x_{j}"
    assert latex("w = w - eta g(w)") == r"w \leftarrow w - \eta g ( w )"
    assert latex("d = force / workers", options=["force"]).startswith(
        r"d = \frac{\mathrm{force}\,}{\text{ workers }}"
    )
    assert latex("p = |dw|^2", assigned=["dw"]) == r"p = \lvert \mathit{dw} \rvert ^{2}"


def test_an_indented_paragraph_of_a_docstring_is_shown_as_it_is_and_bars_are_no_mark_up() -> None:
    text = ["The norm |x| of `x`.", "", "    w = |x|", "", "Args:", "    x: a *vector*", ""]
    assert to_rst(text) == [
        "The norm \\|x\\| of ``x``.",
        "",
        ".. code-block:: text",
        "",
        "    w = |x|",
        "",
        "Args:",
        "    x: a \\*vector\\*",
        "",
    ]


def test_the_site_loads_nothing_from_elsewhere() -> None:
    for path in (ROOT / "website").rglob("*"):
        if path.suffix in (".css", ".py"):
            assert not re.search(r"(?:url\(|src=|href=)[\"']?https?:", Path(path).read_text(encoding="utf-8"))
