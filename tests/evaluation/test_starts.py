from __future__ import annotations

import pytest
import torch
from torch import nn

from sparring.attacks import pgd
from sparring.evaluation.starts import Starts, pgd_from

X = torch.rand(300, 1, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def starts(kind="uniform", **changed):
    return Starts(kind, **{"eps": 0.1, "seed": 0, "purpose": "pgd20", **changed})


@pytest.mark.parametrize("loss", ["ce", "cw"])
def test_takes_the_steps_of_pgd_bitwise(trained, loss):
    settings = {"eps": 0.1, "step_size": 0.03, "steps": 5, "loss": loss}
    ours = pgd_from(trained.model, trained.x, trained.y, start=trained.x.clone(), **settings)
    assert torch.equal(ours, pgd(trained.model, trained.x, trained.y, start=None, **settings))


@pytest.mark.parametrize("kind", ["uniform", "normal"])
@pytest.mark.parametrize("batch", [1, 7, 64, 300])
def test_a_start_belongs_to_the_example(kind, batch):
    rows = torch.arange(300)
    whole = starts(kind)(X, rows)
    draw = starts(kind)
    assert torch.equal(whole, torch.cat([draw(X[part], part) for part in torch.split(rows, batch)]))
    some = torch.tensor([3, 255, 256, 299])
    assert torch.equal(whole[some], starts(kind)(X[some], some))


def test_starts_fill_the_ball_and_lie_inside_it():
    drawn = starts()(X, torch.arange(300))
    assert drawn.min() >= 0 and drawn.max() <= 1
    moved = (drawn - X).abs()
    assert moved.max() <= 0.1 + 1e-12 and moved.max() > 0.099 and 0.04 < moved.mean() < 0.06
    assert torch.equal(starts(None)(X, torch.arange(300)), X)


def test_seed_and_purpose_change_the_start():
    rows = torch.arange(300)
    one = starts()(X, rows)
    assert not torch.equal(one, starts(seed=1)(X, rows))
    assert not torch.equal(one, starts(purpose="pgd100")(X, rows))


def test_a_gradient_that_is_nan_moves_nothing():
    class Broken(nn.Module):
        def forward(self, x):
            return torch.stack([x.sum((1, 2, 3)) * torch.nan, x.sum((1, 2, 3))], dim=1)

    y = torch.zeros(300, dtype=torch.int64)
    assert torch.equal(pgd_from(Broken(), X, y, start=X.clone(), eps=0.1, step_size=0.1, steps=2, loss="ce"), X)
