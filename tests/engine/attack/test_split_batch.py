"""A batch split into parallel parts gives the result of the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sparring.engine.attack.split_batch import SplitBatch, ahead
from tests.engine.streams import Streams


@pytest.mark.parametrize("count", [5, 6, 8])
def test_split_batch_equals_the_whole_batch(count):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 7), nn.Tanh(), nn.Linear(7, 3)).double()
    seen = []
    network.register_forward_pre_hook(lambda module, given: seen.append(len(given[0])))
    split = SplitBatch(network, torch.device("cpu"), {6: (4, 2), 8: (4, 2, 2)})
    x, output_gradient = torch.rand(count, 3, 2, 2).double(), torch.randn(count, 3).double()
    with torch.no_grad():  # the caller may have disabled gradients
        logits, back = split.ahead(x)
    assert tuple(seen) == split.cuts.get(count, (count,))
    expected, whole_back = ahead(network, x)
    assert torch.allclose(logits, expected) and not logits.requires_grad
    point = x.clone().requires_grad_()
    gradient = back(output_gradient)
    assert torch.allclose(gradient, whole_back(output_gradient))
    assert torch.allclose(gradient, torch.autograd.grad(network(point), point, output_gradient)[0])
    assert torch.allclose(split(x), expected)


def test_parts_use_their_own_streams_after_tuning(monkeypatch):
    streams = Streams(monkeypatch)

    def network(x):
        streams.record(f"{len(x)} images")
        return x.flatten(1)[:, :3].clone()

    split = SplitBatch(network, torch.device("cpu"), {6: (4, 2)})
    split.streams = [streams.make("second")]
    x, output_gradient = torch.rand(6, 3, 2, 2), torch.randn(6, 3)
    _, back = split.ahead(x)
    assert streams.take() == ["main: 4 images", "main: 2 images"]  # cuDNN tunes
    back(output_gradient)
    assert streams.take() == []
    _, back = split.ahead(x)
    side_by_side = ["second waits for main", "main: 4 images", "second: 2 images", "main waits for second"]
    assert streams.take() == side_by_side
    back(output_gradient)
    assert streams.take() == [side_by_side[0], side_by_side[-1]]
