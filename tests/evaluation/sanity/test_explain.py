"""Every doubt has a page, and the index lists them all with their reasons."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sparring.errors import UserError
from sparring.evaluation.sanity import explain
from sparring.evaluation.sanity.checks import WHY

PAGES = Path(explain.__file__).parent / "pages"


@pytest.mark.parametrize("name", WHY)
def test_every_doubt_has_a_page_with_cause_and_fix(name: str) -> None:
    text = explain.page(name)
    assert text.startswith(f"# {name}\n")
    for heading in ("What was measured", "Why it matters", "What causes it", "What to do"):
        assert f"## {heading}\n" in text, heading
    assert set(re.findall(r"\]\((.*?)\)", text)) <= {f"{other}.md" for other in WHY}


def test_the_index_lists_every_doubt_with_its_reason() -> None:
    index = (PAGES / "index.md").read_text(encoding="utf-8")
    assert {path.stem for path in PAGES.glob("*.md")} == {*WHY, "index"}
    assert re.findall(r"^\| \[(.*?)\]\((.*?)\) \| (.*) \|$", index, re.M) == [(n, f"{n}.md", w) for n, w in WHY.items()]


def test_documents_count_the_doubts() -> None:
    root = Path(__file__).parents[3]
    assert len(WHY) == 16
    assert "Sixteen checks" in (root / "docs/guides/evaluating-a-claim.md").read_text(encoding="utf-8")
    assert "sixteen named doubts" in (root / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_guide_tells_what_was_measured() -> None:
    root = Path(__file__).parents[3]
    guide = (root / "docs/guides/evaluating-a-claim.md").read_text(encoding="utf-8").replace("\n", " ")
    measured = json.loads((root / "results/evaluation/geometry-reweighting-cpu.json").read_text(encoding="utf-8"))
    assert f"{measured['n']} test images of digits at eps {measured['eps']}" in guide
    for model in measured["models"].values():
        row = [model["accuracy"][name] for name in ("natural", "pgd20", "pgd100", "cw30", "autoattack")]
        named = ", ".join(f"`{doubt['name']}`" for doubt in model["doubts"]) or "none"
        assert "| " + " | ".join([*(f"{100 * rate:.1f}" for rate in row), named]) + " |" in guide
        assert all(doubt["evidence"] in guide for doubt in model["doubts"])


def test_an_unknown_doubt_is_refused_with_the_names() -> None:
    with pytest.raises(UserError, match=r"unknown doubt 'zero'.*Known: .*zero-gradients"):
        explain.page("zero")
