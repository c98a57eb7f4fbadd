"""What Sphinx is told; `website.__main__` lays out the pages that it reads."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import tutti
from website.docstrings import to_rst

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "tutti"
author = "the tutti authors"
release = tutti.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
source_suffix = {".md": "markdown"}
highlight_language = "text"
smartquotes = False  # it would make one long dash of --option
pygments_style = "friendly"
pygments_dark_style = "monokai"

myst_heading_anchors = 4
myst_enable_extensions = ["deflist"]

autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

html_theme = "furo"
html_title = "tutti"
html_show_copyright = False  # the licence names no owner, and "Copyright ©" alone says nothing
html_favicon = "static/favicon.svg"
html_static_path = ["static"]
html_css_files = ["style.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6e5f", "color-brand-content": "#0b6e5f"},
    "dark_css_variables": {"color-brand-primary": "#5fd0bb", "color-brand-content": "#5fd0bb"},
}


def _convert(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    lines[:] = to_rst(lines)


def _leave_out_private(
    app: Sphinx,
    what: str,
    name: str,
    value: object,
    options: object,
    arguments: str | None,
    returned: str | None,
) -> tuple[str | None, str | None]:
    """A signature without parameters that begin with an underscore: they are the class's own."""
    shown = arguments and re.sub(r", _\w+: [^,()]*(?=[,)])", "", arguments)
    return shown, returned


def setup(app: Sphinx) -> None:
    """Have docstrings and signatures converted before anything else reads them."""
    app.connect("autodoc-process-docstring", _convert, priority=100)
    app.connect("autodoc-process-signature", _leave_out_private)
