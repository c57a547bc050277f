"""The checks as pure functions: they ignore differences within noise and report those above it."""

from __future__ import annotations

import pytest
import torch

from sparring.evaluation.sanity import checks


def verdict(n: int, right: int) -> torch.Tensor:
    return torch.arange(n) < right


@pytest.mark.parametrize("n", [16, 100, 1000, 10000])
def test_differences_within_noise_do_not_count(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    for _ in range(200):  # two independent attacks of equal strength
        left, right = (torch.rand(n, generator=generator) < 0.5 for _ in range(2))
        assert checks.more_steps_weaker({20: left, 100: right}) is None
        assert checks.cw_far_from_ce(left, right) is None


def test_differences_above_noise_count() -> None:
    assert checks.more_steps_weaker({20: verdict(1000, 500), 100: verdict(1000, 515)}) is not None
    assert checks.more_steps_weaker({20: verdict(1000, 515), 100: verdict(1000, 500)}) is None
    assert checks.more_steps_weaker({20: verdict(10000, 5000), 100: verdict(10000, 5050)}) is None  # half a point
    assert checks.cw_far_from_ce(verdict(200, 100), verdict(200, 70)) is not None
    assert checks.cw_far_from_ce(verdict(200, 100), verdict(200, 88)) is None  # MART's 5 to 6 points


def test_bounds() -> None:
    assert checks._lower(0, 10) == pytest.approx(0)
    assert checks._upper(10, 10) == pytest.approx(1)
    assert checks._lower(50, 100) == pytest.approx(0.355, abs=0.01)
    assert checks._upper(50, 100) == pytest.approx(0.645, abs=0.01)
    assert (checks._lower(0, 0), checks._upper(0, 0)) == (0.0, 1.0)


def test_nan_gradients_count_as_zero() -> None:
    assert checks.zero_gradients(torch.full((50,), torch.nan), torch.ones(50)) is not None
