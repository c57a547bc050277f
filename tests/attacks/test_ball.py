from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparring.attacks import ball


@given(seed=st.integers(0, 1000), eps=st.floats(1e-3, 1.0))
def test_projection_lies_inside_and_is_idempotent(seed, eps):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(3, 2, 4, generator=generator, dtype=torch.float64)
    anywhere = torch.randn(3, 2, 4, generator=generator, dtype=torch.float64) * 3
    inside = ball.project(anywhere, x, eps)
    assert (inside - x).abs().max() <= eps + 1e-12
    assert inside.min() >= 0
    assert inside.max() <= 1
    assert torch.equal(ball.project(inside, x, eps), inside)


@given(seed=st.integers(0, 1000))
def test_projection_is_the_nearest_point(seed):
    """Coordinate by coordinate, no point of a fine grid inside is nearer."""
    generator = torch.Generator().manual_seed(seed)
    x, away = torch.rand(1, generator=generator), torch.randn(1, generator=generator) * 2
    grid = torch.linspace(max(0.0, x.item() - 0.2), min(1.0, x.item() + 0.2), 2001)
    assert (ball.project(away, x, 0.2) - away).abs().item() <= (grid - away).abs().min().item() + 1e-6


def test_starts():
    x = torch.full((2000, 1, 2, 2), 0.5)

    def drawn(start, **changes):
        return ball.random_start(x, eps=0.1, start=start, generator=torch.Generator().manual_seed(0), **changes)

    assert torch.equal(drawn(None), x)
    assert drawn(None) is not x
    uniform = drawn("uniform") - x
    assert uniform.abs().max() <= 0.1 + 1e-6
    assert uniform.std() == pytest.approx(0.1 / 3**0.5, rel=0.05)
    normal = drawn("normal") - x
    assert normal.std() == pytest.approx(0.001, rel=0.05)


@pytest.mark.parametrize("start", ["uniform", "normal"])
def test_a_start_stays_in_range(start):
    x = torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1).repeat(500, 1, 1, 1)
    drawn = ball.random_start(x, eps=0.0005, start=start, generator=torch.Generator().manual_seed(0))
    assert drawn.min() >= 0
    assert drawn.max() <= 1
    assert (drawn - x).abs().max() <= 0.0005 + 1e-7
    free = ball.random_start(x, eps=0.0005, start="normal", generator=torch.Generator().manual_seed(0), inside=False)
    assert (free - x).abs().max() > 0.0005


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_outward_is_the_edge_of_the_ball_on_the_same_line(norm):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(20, 3, 4, 4, generator=generator, dtype=torch.float64) * 0.4 + 0.3
    shift = torch.randn(x.shape, generator=generator, dtype=torch.float64) * 0.01
    shift[0] = 0
    moved = ball.outward(x + shift, x, 0.25, norm) - x
    sizes = (moved.abs().flatten(1).amax(1) if norm == "linf" else moved.flatten(1).norm(dim=1)).tolist()
    assert sizes == pytest.approx([0.0] + [0.25] * 19)
    factors = moved[1:] / shift[1:]
    torch.testing.assert_close(factors, factors[:, :1, :1, :1].expand_as(factors))
    assert factors.min() > 1
    assert torch.equal(ball.outward(torch.ones(1, 2), torch.tensor([[0.9, 0.95]]), 0.5, norm), torch.ones(1, 2))
