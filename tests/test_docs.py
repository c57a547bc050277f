"""The documentation site builds without a warning, and its pages hold what they promise."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RULE = "A module imports only from rooms below its own."
NEEDED = ("sphinx", "myst_parser", "furo", "latex2mathml")
missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built as `make docs` builds it."""
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install -c constraints.txt -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "docs", str(folder)]
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    built = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_is_built(site):
    pages = [path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.md")]
    pages = [path for path in pages if path.parts[0] != "_build"]
    assert len(pages) > 10
    for page in pages:
        assert (site / page.with_suffix(".html")).is_file(), page


def test_api_reference_has_the_public_names(site):
    import sparring

    text = (site / "_generated/api/sparring.html").read_text(encoding="utf-8")
    for name in sparring.__all__:
        if not name.startswith("__"):
            assert re.search(rf">{name}</span>", text), name
    assert 'id="sparring.attacks.friendly_pgd"' in (site / "_generated/api/sparring.attacks.html").read_text("utf-8")


def test_every_doubt_has_a_page(site):
    index = (site / "_generated/doubts/index.html").read_text(encoding="utf-8")
    pages = {path.name for path in (site / "_generated/doubts").glob("*.html")} - {"index.html"}
    assert len(pages) == 16
    for page in pages:
        assert f'href="{page}"' in index, page


def test_equations_are_mathml_and_nothing_is_loaded_from_elsewhere(site):
    text = (site / "methods.html").read_text(encoding="utf-8")
    assert text.count("<math ") > 20
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text("utf-8"))
        assert not loaded, page


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "docs/design.md"])
def test_the_layering_rule_is_stated_in_the_same_words(name):
    assert RULE in (ROOT / name).read_text(encoding="utf-8")
