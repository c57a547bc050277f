"""The doubts' checks by themselves: noise does not fire, more than noise does; and each has its page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sparring.evaluation.sanity import checks
from sparring.evaluation.sanity.checks import WHY

DOCS = Path(checks.__file__).parent / "pages"


def verdict(n: int, right: int) -> torch.Tensor:
    return torch.arange(n) < right


@pytest.mark.parametrize("n", [16, 100, 1000, 10000])
def test_differences_within_noise_do_not_count(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    for _ in range(200):  # two attacks of equal strength, independent of one another
        left, right = (torch.rand(n, generator=generator) < 0.5 for _ in range(2))
        assert checks.more_steps_weaker({20: left, 100: right}) is None
        assert checks.cw_far_from_ce(left, right) is None


def test_differences_above_noise_do() -> None:
    assert checks.more_steps_weaker({20: verdict(1000, 500), 100: verdict(1000, 515)}) is not None
    assert checks.more_steps_weaker({20: verdict(1000, 515), 100: verdict(1000, 500)}) is None
    assert checks.more_steps_weaker({20: verdict(10000, 5000), 100: verdict(10000, 5050)}) is None  # half a point
    assert checks.cw_far_from_ce(verdict(200, 100), verdict(200, 70)) is not None
    assert checks.cw_far_from_ce(verdict(200, 100), verdict(200, 88)) is None  # MART's 5 to 6 points


def test_bounds() -> None:
    assert checks._least(0, 10) == pytest.approx(0)
    assert checks._most(10, 10) == pytest.approx(1)
    assert checks._least(50, 100) == pytest.approx(0.355, abs=0.01)
    assert checks._most(50, 100) == pytest.approx(0.645, abs=0.01)
    assert (checks._least(0, 0), checks._most(0, 0)) == (0.0, 1.0)


def test_gradients_that_are_no_numbers_count_as_none() -> None:
    assert checks.zero_gradients(torch.full((50,), torch.nan), torch.ones(50)) is not None


def test_each_doubt_has_its_page() -> None:
    pages = {path.stem for path in DOCS.glob("*.md")} - {"index"}
    assert pages == set(WHY)
    index = (DOCS / "index.md").read_text()
    for name in WHY:
        text = (DOCS / f"{name}.md").read_text()
        assert text.startswith(f"# {name}\n")
        for heading in ("What was seen", "Why it matters", "What causes it", "What to do"):
            assert f"## {heading}" in text, f"{name}: {heading}"
        assert f"({name}.md)" in index
