"""Figure 1 on real points: two wavy bands in the unit square, a small network, PGD with and without early stopping.

The seed determines the points and the network. The attacks start at the points themselves and are deterministic.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from sparring.attacks import friendly_pgd, pgd
from sparring.paper.measure.mixing import mixing
from sparring.paper.specs import Motivation
from sparring.seeds import derive_seed, generator

_POINTS, _WEIGHTS = range(1, 3)  # keys of the random streams
GRID = 61  # points per side of the grid that the boundary is drawn from


def bands(what: Motivation, seed: int) -> tuple[Tensor, Tensor]:
    """Points (2n, 2) in the unit square and their labels: a lower and an upper band."""
    draws = generator("cpu", seed, _POINTS)
    across = 0.06 + 0.88 * torch.rand(2, what.points, generator=draws)
    blur = what.blur * torch.randn(2, what.points, generator=draws)
    side = torch.tensor([[-0.5], [0.5]]) * what.gap
    height = 0.5 + side + what.wave * torch.sin(2 * math.pi * across) + blur
    points = torch.stack([across, height], dim=2).reshape(-1, 2).clamp(0.0, 1.0)
    return points, torch.arange(2).repeat_interleave(what.points)


def network(what: Motivation, x: Tensor, y: Tensor, seed: int) -> nn.Module:
    """A network of two hidden layers, trained on the natural points. Leaves the global random state unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed(seed, _WEIGHTS))
        model = nn.Sequential(
            nn.Linear(2, what.hidden),
            nn.Tanh(),
            nn.Linear(what.hidden, what.hidden),
            nn.Tanh(),
            nn.Linear(what.hidden, 2),
        )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(what.updates):
        optimizer.zero_grad()
        torch.autograd.backward(F.cross_entropy(model(2 * x - 1), y))
        optimizer.step()
    return nn.Sequential(_Centre(), model).eval()


class _Centre(nn.Module):
    """Normalisation: maps the unit square to [-1, 1]²."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x - 1


def measure(what: Motivation, seed: int) -> dict[str, Any]:
    """The points after every step of both attacks, and how far the classes are mixed."""
    x, y = bands(what, seed)
    model = network(what, x, y, seed)
    settings: dict[str, Any] = {"eps": what.eps, "step_size": what.step_size, "start": None}
    paths: dict[str, list[Tensor]] = {"pgd": [x], "friendly": [x]}
    for steps in range(1, what.steps + 1):
        paths["pgd"].append(pgd(model, x, y, steps=steps, **settings))
        paths["friendly"].append(friendly_pgd(model, x, y, steps=steps, tau=0, **settings).x_adv)
    return {
        "n": len(x),
        "labels": y.tolist(),
        "probability": _rounded(_probability(model)),
        "paths": {name: [_rounded(points) for points in path] for name, path in paths.items()},
        "mixing": {
            name: [
                {
                    "wrong": float((model(points).argmax(dim=1) != y).double().mean()),
                    **mixing(points, y, x, what.neighbours),
                }
                for points in path
            ]
            for name, path in paths.items()
        },
    }


@torch.no_grad()
def _probability(model: nn.Module) -> Tensor:
    """The probability of class 1 on a grid over the square, row by row from the bottom."""
    axis = torch.linspace(0, 1, GRID)
    points = torch.cartesian_prod(axis, axis).flip(1)  # (y, x) -> (x, y)
    probability: Tensor = model(points).softmax(dim=1)[:, 1].reshape(GRID, GRID)
    return probability


def _rounded(values: Tensor) -> list[Any]:
    """Nested lists, rounded to a thousandth of the square's side."""
    numbers: list[Any] = [[round(number, 3) for number in row] for row in values.tolist()]
    return numbers
