"""Parts side by side are the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparring.engine.parts import CUTS, Parted, ahead


@pytest.mark.parametrize("count", [5, 6, 8])
def test_parts_are_the_whole(count):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    seen = []
    network.register_forward_pre_hook(lambda module, given: seen.append(len(given[0])))
    parted = Parted(network, torch.device("cpu"), {6: (4, 2), 8: (4, 2, 2)})
    x, slope = torch.rand(count, 3, 2, 2).double(), torch.randn(count, 3).double()
    logits, back = parted.ahead(x)
    assert tuple(seen) == parted.cuts.get(count, (count,))
    expected, way = ahead(network, x)
    assert torch.allclose(logits, expected) and not logits.requires_grad
    point = x.clone().requires_grad_()
    gradient = back(slope)
    assert torch.allclose(gradient, way(slope))
    assert torch.allclose(gradient, torch.autograd.grad(network(point), point, slope)[0])
    assert torch.allclose(parted(x), expected)


def test_cuts_are_cuts():
    assert all(sum(cut) == size and len(cut) > 1 and min(cut) > 0 for size, cut in CUTS.items())
