"""What is found aside and what autograd finds are one gradient."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.grad import conv2d_weight

from sparring.engine.update.weight_gradients import WeightGradientStream
from tests.engine.streams import Streams


class SideStream(nn.Module):
    """A convolution whose weight's gradient is found aside, filled up with zeros."""

    def __init__(self, conv, aside, more=0):
        super().__init__()
        self.conv, self.aside, self.more = conv, aside, more

    def forward(self, x):
        weight = nn.functional.pad(self.conv.weight, (0, 0, 0, 0, 0, 0, 0, self.more))
        return self.aside.convolution(x, self.conv, weight)[:, : self.conv.out_channels]


@pytest.fixture
def both():
    torch.manual_seed(0)
    aside = WeightGradientStream(torch.device("cpu"))
    convs = [nn.Conv2d(3, 6, 3, padding=1, stride=2, bias=False), nn.Conv2d(6, 4, 3, dilation=2, groups=2, bias=False)]
    convs = [conv.double() for conv in convs]
    end = nn.Sequential(nn.Flatten(), nn.LazyLinear(5)).double()
    ours = nn.Sequential(SideStream(convs[0], aside, more=2), nn.Tanh(), SideStream(convs[1], aside), nn.Tanh(), end)
    theirs = nn.Sequential(convs[0], nn.Tanh(), convs[1], nn.Tanh(), end)
    theirs(torch.zeros(1, 3, 16, 16).double())
    return aside, ours, theirs


def images(seed):
    return torch.rand(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed)).double()


LOSSES = {
    "once": lambda model: model(images(0)).square().sum(),
    "twice": lambda model: model(images(0)).square().sum() + model(images(1)).pow(3).sum(),
    "and the weights themselves": lambda model: model(images(0)).sum() + model[0].weight.square().sum(),
    "only the weights": lambda model: sum(p.pow(3).sum() for p in model.parameters()),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_the_same_gradient(both, loss):
    aside, ours, theirs = both
    ours[0].weight = theirs[0].weight  # the same tensor, by the name that the loss knows
    leaves = list(theirs.parameters())
    expected = torch.autograd.grad(LOSSES[loss](theirs), leaves)
    for _ in range(2):  # the second time nothing is left of the first
        found = aside.gradients(LOSSES[loss](ours), leaves)
        assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))
        assert [g.stride() for g in found] == [leaf.stride() for leaf in leaves]
        assert not aside.found and not aside.read


def test_every_copy_of_a_weight_brings_its_gradient():
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
    aside = WeightGradientStream(torch.device("cpu"))
    x = torch.rand(4, 8, 8, 8)  # halves that have nothing to do with each other
    out = aside.convolution(x, conv, nn.functional.pad(torch.cat([conv.weight] * 2, 1), (0, 0, 0, 0, 0, 2)), 2)
    slope = torch.randn(out.shape)
    (found,) = aside.gradients((out * slope).sum(), [conv.weight])
    there = sum(conv2d_weight(x[:, place : place + 3], conv.weight.shape, slope, padding=1) for place in (0, 3))
    torch.testing.assert_close(found, there, rtol=1e-4, atol=1e-3)


def test_a_way_back_that_nobody_asked_for_leaves_nothing(both):
    aside, ours, theirs = both
    LOSSES["twice"](ours).backward()
    leaves = list(theirs.parameters())
    expected = torch.autograd.grad(LOSSES["once"](theirs), leaves)
    found = aside.gradients(LOSSES["once"](ours), leaves)
    assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))


def test_what_waits_for_what(both, monkeypatch):
    """Weights' gradients run on a stream of their own, once cuDNN has tuned, and nobody writes over what they read."""
    aside, ours, theirs = both
    streams = Streams(monkeypatch)
    aside.stream = streams.make("aside")
    add = aside._add

    def told(conv, *given):
        streams.say(f"{conv.out_channels}, {len(aside.read)} held")
        add(conv, *given)

    monkeypatch.setattr(aside, "_add", told)
    leaves = list(theirs.parameters())
    expected = torch.autograd.grad(LOSSES["twice"](theirs), leaves)
    first, second = (aside.gradients(LOSSES["twice"](ours), leaves) for _ in range(2))
    for found in (first, second):
        assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))
    said = streams.take()
    over = "main waits for aside"
    assert said.count(over) == 2 + 1 + 1  # to tune two kinds; at each end
    launched = [line.partition(",")[0] for line in said if ":" in line]
    assert sorted(launched[:4]) == ["aside: 4", "aside: 6", "main: 4", "main: 6"]  # the second pass is tuned already
    assert sorted(launched[4:]) == ["aside: 4"] * 2 + ["aside: 6"] * 2
    for place, line in enumerate(said):
        if line.startswith("aside: "):
            assert said[place - 1] == "aside waits for main" and not line.endswith(" 0 held")
        if line.startswith("main: "):
            assert said[place - 1] == over
    held = [int(line.split()[-2]) for line in said if line.startswith("aside: ")][-4:]
    assert held == [3, 6, 10, 14]  # of the second pass over a layer also what the first one found
    assert said[-1] == over and not aside.read


def test_a_way_back_that_fails_is_waited_for(both, monkeypatch):
    aside, ours, theirs = both
    streams = Streams(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    aside.stream = streams.make("aside")
    loss = LOSSES["once"](ours)
    torch.autograd.grad(loss, [theirs[2].weight], allow_unused=True)  # and so it cannot be gone back a second time
    with pytest.raises(RuntimeError, match="second time"):
        aside.gradients(loss, [theirs[2].weight])
    assert streams.take()[-1] == "all wait for aside" and not aside.read and not aside.found


def test_some_leaves_alone(both):
    aside, ours, theirs = both
    some = [theirs[2].weight]
    expected = torch.autograd.grad(LOSSES["once"](theirs), some)
    assert torch.allclose(aside.gradients(LOSSES["once"](ours), some)[0], expected[0])


def test_frozen_weights_and_images_with_a_gradient(both):
    aside, ours, theirs = both
    theirs[0].weight.requires_grad_(False)
    x = images(0).requires_grad_()
    expected = torch.autograd.grad(theirs(x).square().sum(), [x, theirs[2].weight])
    found = aside.gradients(ours(x).square().sum(), [x, theirs[2].weight])
    assert all(torch.allclose(a, b) for a, b in zip(found, expected, strict=True))


def test_images_are_cast_to_the_weights_precision(both):
    aside, _, _ = both
    conv = nn.Conv2d(3, 6, 3, bias=False).bfloat16()
    x = images(0).float().requires_grad_()
    out = SideStream(conv, aside)(x)
    assert out.dtype == torch.bfloat16
    of_x, of_weight = aside.gradients(out.float().sum(), [x, conv.weight])
    assert of_x.dtype == torch.float32 and of_weight.dtype == torch.bfloat16


def test_a_weight_that_takes_no_part_is_told(both):
    aside, ours, theirs = both
    with pytest.raises(RuntimeError, match="takes no part"):
        aside.gradients(LOSSES["once"](ours), [theirs[0].weight, nn.Parameter(torch.zeros(3))])
    assert not aside.found and not aside.read
