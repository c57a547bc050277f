"""FAB's projections: the package's own, and what they promise."""

from __future__ import annotations

import pytest
import torch
from pyautoattack.fab_projections import projection_linf

from sparring.attacks import hyperplane
from sparring.attacks.hyperplane import steps_to_hyperplane


def problem(distance: float, *, count: int = 60, pixels: int = 300):
    """Points in the box with pixels at its ends, normals with zeros, and hyperplanes at about this distance."""
    draw = torch.Generator().manual_seed(0)
    points = torch.rand(count, pixels, generator=draw)
    points[:, ::7], points[:, ::11] = 0, 1
    normals = torch.randn(count, pixels, generator=draw) * torch.rand(count, pixels, generator=draw) ** 4
    normals[:, ::13] = 0
    away = distance * torch.randn(count, generator=draw) * normals.abs().sum(1)
    return points, normals, (normals * points).sum(1) + away


@pytest.mark.parametrize("distance", [0.0, 1e-5, 0.001, 0.03, 0.3, 3.0])
def test_they_are_those_of_the_package(distance):
    points, normals, offsets = problem(distance)
    ours = steps_to_hyperplane(points, normals, offsets)
    theirs = projection_linf(points.clone(), normals.clone(), offsets.clone())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)


def test_they_reach_the_hyperplane_and_no_smaller_step_does():
    points, normals, offsets = (each.double() for each in problem(0.03))
    steps = steps_to_hyperplane(points, normals, offsets)
    moved = points + steps
    assert moved.min() >= -1e-12 and moved.max() <= 1 + 1e-12
    away = (normals * points).sum(1) - offsets
    left = (normals * moved).sum(1) - offsets
    reached = left.abs() < 1e-9 * normals.abs().sum(1)
    assert reached.sum() > 40
    # Against a hyperplane that is missed, all pixels go as far as they can.
    corner = torch.where((normals < 0) == (away[:, None] >= 0), 1.0, 0.0)
    used = normals[~reached] != 0
    assert torch.allclose(moved[~reached][used], corner[~reached].double()[used])
    # With a hundredth less room for every pixel, the hyperplane is not reached.
    shorter = 0.99 * steps.abs().amax(1, keepdim=True)
    nearer = (normals * (points + steps.clamp(-shorter, shorter))).sum(1) - offsets
    assert (nearer[reached] * away[reached] > 0)[steps.abs().amax(1)[reached] > 0].all()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("where", ["normals", "offsets"])
def test_numbers_that_are_not_finite_lead_to_the_corner_of_the_package(bad, where):
    points, normals, offsets = problem(0.01)
    if where == "normals":
        normals[::2, 5] = bad
    else:
        offsets[::2] = bad
    ours = steps_to_hyperplane(points, normals, offsets)
    theirs = projection_linf(points.clone(), normals.clone(), offsets.clone())
    seen = theirs.isfinite().all(1)
    assert ours.isfinite().all() and seen.sum() >= 30
    torch.testing.assert_close(ours[seen], theirs[seen], rtol=0, atol=2e-6)


def test_without_a_gradient_nothing_moves():
    points, normals, offsets = problem(0.1)
    assert not steps_to_hyperplane(points, torch.zeros_like(normals), offsets).any()


def test_looking_less_often_ends_at_the_same_points(monkeypatch):
    """As on a GPU."""
    points, normals, offsets = problem(0.03)
    expected = steps_to_hyperplane(points, normals, offsets)
    monkeypatch.setattr(hyperplane, "_ON_CPU", 3)
    torch.testing.assert_close(steps_to_hyperplane(points, normals, offsets), expected, rtol=0, atol=1e-6)
