"""Configuration of the documentation site: `make docs`.

Two kinds of page are generated into docs/_generated before every build: the doubts (their source is in the package,
so that `pip install` brings them), and one API page for each public room.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert
from sphinx.application import Sphinx

import sparring

DOCS = Path(__file__).parent
GENERATED = DOCS / "_generated"
PACKAGE = DOCS.parent / "src" / "sparring"
ROOMS = ("attacks", "objectives", "training", "evaluation", "weights", "models", "data")

project = "Sparring"
author = copyright = "The Sparring authors"
version = release = sparring.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
suppress_warnings = ["ref.python"]  # a name that is public in two places, such as sparring.pgd and sparring.attacks.pgd

html_theme = "furo"
html_title = "Sparring"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_show_sourcelink = False
html_math_renderer = "mathml"

myst_enable_extensions = ["dollarmath", "colon_fence"]
myst_heading_anchors = 3

autodoc_default_options = {"members": True, "undoc-members": True, "member-order": "bysource"}
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 72
default_role = "code"


def write_doubts() -> None:
    """Copy the pages of the doubts, with an index."""
    folder = GENERATED / "doubts"
    shutil.copytree(PACKAGE / "evaluation" / "sanity" / "pages", folder)
    index = folder / "index.md"
    text = index.read_text(encoding="utf-8")
    toctree = "\n:::{toctree}\n:hidden:\n:glob:\n\n*\n:::\n"
    index.write_text("(doubt-pages)=\n" + text + toctree, encoding="utf-8")


def write_api() -> None:
    """One page for `sparring` itself, and one for each room that there is."""
    folder = GENERATED / "api"
    folder.mkdir(parents=True)
    names = [room for room in ROOMS if importlib.util.find_spec(f"sparring.{room}")]
    for name in ["sparring", *(f"sparring.{room}" for room in names)]:
        # The names of `sparring` are indexed where they are defined, in their rooms.
        index = "   :no-index:\n" if name == "sparring" else ""
        page = f"{name}\n{'=' * len(name)}\n\n.. automodule:: {name}\n{index}"
        (folder / f"{name}.rst").write_text(page, encoding="utf-8")


def as_rst(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Turn a docstring of plain text with `code` into reStructuredText, so that no equation in it is read as markup."""
    written: list[str] = []
    section = example = False
    for line in lines:
        indented = line.startswith("    ")
        if line and not indented:  # napoleon reads what is indented below Args: and the like
            section = line in ("Args:", "Returns:", "Raises:", "Attributes:", "Yields:")
        begins = indented and not section and not example and not (written and written[-1])
        example = begins or (example and (indented or not line))
        if begins:
            written += ["::", ""]
        written.append(line if example else _escaped(line))
    lines[:] = written


def _escaped(line: str) -> str:
    """`code` in double backquotes, and every other mark of reStructuredText escaped."""
    parts = re.split(r"`([^`]+)`", line)
    parts[1::2] = [f"``{part}``" for part in parts[1::2]]
    parts[::2] = [re.sub(r"([*|\\]|_\b)", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


def outside_links(app: Sphinx, docname: str, source: list[str]) -> None:
    """Offer the files of results/ for download: they are not pages of the site. The doubts have pages in it."""
    doubts = r"\((?:\.\./)+src/sparring/evaluation/sanity/pages/index\.md\)"
    source[0] = re.sub(doubts, "(#doubt-pages)", source[0])
    source[0] = re.sub(
        r"(?<!!)(\[[^\]]*\])\((?:\.\./)+(results/[^)]+|benchmarks/[^)]+)\)", r"\1(path:/../\2)", source[0]
    )


def inline_math(self: Any, node: nodes.math) -> None:
    """MathML, which every browser shows without a script."""
    self.body.append(convert(node.astext()))
    raise nodes.SkipNode


def block_math(self: Any, node: nodes.math_block) -> None:
    """The same in a line of its own, which scrolls where the screen is narrow."""
    self.body.append(f'<div class="math">{convert(node.astext(), display="block")}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    """Write the generated pages and register the hooks."""
    shutil.rmtree(GENERATED, ignore_errors=True)
    write_doubts()
    write_api()
    app.connect("autodoc-process-docstring", as_rst, priority=400)  # before napoleon
    app.connect("source-read", outside_links)
    app.add_html_math_renderer("mathml", inline_renderers=(inline_math, None), block_renderers=(block_math, None))
    return {"parallel_read_safe": True}
