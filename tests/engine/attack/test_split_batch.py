"""Parts side by side are the whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparring.engine.attack.split_batch import SplitBatch, ahead
from tests.engine.streams import Streams


@pytest.mark.parametrize("count", [5, 6, 8])
def test_parts_are_the_whole(count):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    seen = []
    network.register_forward_pre_hook(lambda module, given: seen.append(len(given[0])))
    parted = SplitBatch(network, torch.device("cpu"), {6: (4, 2), 8: (4, 2, 2)})
    x, output_gradient = torch.rand(count, 3, 2, 2).double(), torch.randn(count, 3).double()
    with torch.no_grad():  # the caller may be inside no_grad
        logits, back = parted.ahead(x)
    assert tuple(seen) == parted.cuts.get(count, (count,))
    expected, way = ahead(network, x)
    assert torch.allclose(logits, expected) and not logits.requires_grad
    point = x.clone().requires_grad_()
    gradient = back(output_gradient)
    assert torch.allclose(gradient, way(output_gradient))
    assert torch.allclose(gradient, torch.autograd.grad(network(point), point, output_gradient)[0])
    assert torch.allclose(parted(x), expected)


def test_parts_have_streams_of_their_own_once_they_are_tuned(monkeypatch):
    streams = Streams(monkeypatch)

    def network(x):
        streams.say(f"{len(x)} images")
        return x.flatten(1)[:, :3].clone()

    parted = SplitBatch(network, torch.device("cpu"), {6: (4, 2)})
    parted.streams = [streams.make("second")]
    x, output_gradient = torch.rand(6, 3, 2, 2), torch.randn(6, 3)
    _, back = parted.ahead(x)
    assert streams.take() == ["main: 4 images", "main: 2 images"]  # cuDNN tunes
    back(output_gradient)
    assert streams.take() == []
    _, back = parted.ahead(x)
    side_by_side = ["second waits for main", "main: 4 images", "second: 2 images", "main waits for second"]
    assert streams.take() == side_by_side
    back(output_gradient)
    assert streams.take() == [side_by_side[0], side_by_side[-1]]
