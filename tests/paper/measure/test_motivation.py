"""Two bands of points: PGD ends amid the other class, early-stopped PGD does not."""

from __future__ import annotations

import torch

from sparring.paper.measure import motivation
from sparring.paper.specs import Motivation

WHAT = Motivation(points=30, updates=200, neighbours=5)


def test_pgd_ends_amid_the_other_class_and_early_stopped_pgd_does_not():
    state = torch.get_rng_state()
    found = motivation.measure(WHAT, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    worst, friendly = found["mixing"]["pgd"], found["mixing"]["friendly"]
    assert worst[0] == friendly[0] and worst[0]["wrong"] < 0.05 and worst[0]["amidst"] == 0
    assert worst[-1]["wrong"] > 0.9 and friendly[-1]["wrong"] > 0.9  # both fool the network
    assert worst[-1]["amidst"] > 0.6 > 0.4 > friendly[-1]["amidst"]
    paths = {kind: torch.tensor(path) for kind, path in found["paths"].items()}
    assert paths["pgd"].shape == (WHAT.steps + 1, 2 * WHAT.points, 2)
    for path in paths.values():
        assert (path - path[0]).abs().max() <= WHAT.eps + 1e-3 and path.min() >= 0 and path.max() <= 1
    # Until it stops, the friendly attack takes the same steps as PGD.
    moved = (paths["friendly"][1:] != paths["friendly"][:-1]).any(dim=2)
    assert torch.equal(paths["friendly"][1:][moved], paths["pgd"][1:][moved])
    assert not moved.all() and motivation.measure(WHAT, seed=3) == found


def test_another_seed_gives_other_points():
    one, other = (motivation.bands(WHAT, seed)[0] for seed in (0, 1))
    assert not torch.equal(one, other)


def test_the_boundary_is_drawn_the_right_way_up():
    x, y = motivation.bands(WHAT, 0)
    model = motivation.network(WHAT, x, y, 0)
    grid = motivation._probability(model)
    low, high = torch.tensor([[0.5, 0.1]]), torch.tensor([[0.5, 0.9]])
    for point, row in ((low, 6), (high, 54)):
        assert torch.allclose(model(point).softmax(dim=1)[0, 1], grid[row, 30], atol=1e-5)
    assert grid[6, 30] < 0.5 < grid[54, 30]
