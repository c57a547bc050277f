"""Mixing of classes, on points where it is known."""

from __future__ import annotations

import pytest
import torch

from sparring.paper.measure.mixing import mixing

Y = torch.tensor([0] * 5 + [1] * 5)
NATURAL = torch.cat([torch.linspace(0, 1, 5), torch.linspace(100, 101, 5)])[:, None]


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        (NATURAL, {"purity": 1.0, "foreign": 0.0, "amidst": 0.0}),
        (NATURAL.flip(0), {"purity": 1.0, "foreign": 1.0, "amidst": 1.0}),  # swapped classes: still pure
        (NATURAL.roll(5, 0)[:5].repeat(2, 1), {"foreign": 0.5, "amidst": 0.5}),  # the first class is at the second
    ],
)
def test_known_cases(points, expected):
    found = mixing(points, Y, NATURAL, k=3)
    for name, value in expected.items():
        assert found[name] == pytest.approx(value), name


def test_the_point_it_was_made_from_is_not_a_neighbour():
    points = torch.tensor([[0.0], [10.0], [0.1], [10.1]])
    assert mixing(points, torch.tensor([0, 0, 1, 1]), points, k=1) == {"purity": 0.0, "foreign": 1.0, "amidst": 1.0}


def test_layers_of_any_shape():
    x = torch.randn(6, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    assert 0 <= mixing(x, torch.tensor([0, 1] * 3), x, k=100)["foreign"] <= 1
