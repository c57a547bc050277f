"""The Triton convolutions equal torch's, run by Triton's interpreter on a CPU (tests/conftest.py).

In fp16 and fp32: the interpreter cannot multiply bf16.
"""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("triton", reason="the kernels need Triton, which pip install -e '.[dev]' brings on Linux")
if torch.cuda.is_available():
    pytest.skip("for the interpreter; on CUDA run benchmarks/check_engine.py", allow_module_level=True)

from torch.nn.grad import conv2d_input

from sparring.engine.attack.active_set import ActiveSet
from sparring.engine.attack.folded import fold
from sparring.engine.attack.replay import Replayed
from sparring.engine.manual import fused_ops
from sparring.engine.manual.chain import ManualChain
from sparring.engine.triton import attack_step, conv, first_layer, pooling
from sparring.engine.triton.conv import Tiling
from sparring.models import build
from tests.engine.networks import OneBlock, Residual

CPU = torch.device("cpu")


def image(draw, *shape):
    return torch.randn(shape, generator=draw).half().contiguous(memory_format=torch.channels_last)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 1000),
    images=st.integers(1, 3),
    channels=st.sampled_from([(64, 64), (128, 64), (64, 128)]),
    side=st.sampled_from([1, 3]),
    stride=st.sampled_from([1, 2]),
    split=st.integers(1, 5),
    around=st.sampled_from(["nothing", "sum", "shortcut"]),
)
def test_convolution_forward_and_backward(seed, images, channels, side, stride, split, around):
    draw = torch.Generator().manual_seed(seed)
    inner, outer = channels
    cut = Tiling(32, 64, 32, split)
    arrived = torch.zeros(256, dtype=torch.int32)
    x, weight = image(draw, images, inner, 4, 8), image(draw, outer, inner, side, side) / 16
    bias = torch.randn(outer, generator=draw).half()
    expected = F.conv2d(x.float(), weight.float(), bias.float(), stride, side // 2)
    more = {}
    if around == "sum":
        more["z"] = image(draw, *expected.shape)
        expected = expected + more["z"].float()
    if around == "shortcut":
        size = [2 * length for length in expected.shape[2:]]
        more["shortcut"] = (image(draw, images, 32, *size), image(draw, outer, 32, 1, 1) / 8, 2)
        expected = expected + F.conv2d(more["shortcut"][0].float(), more["shortcut"][1].float(), None, 2)
    ours = conv.conv(x, weight, stride=stride, arrived=arrived, cut=cut, bias=bias, relu=True, **more)
    assert torch.allclose(ours.float(), F.relu(expected), rtol=2e-3, atol=2e-3)
    if side == 1 and stride == 2:
        return  # backward it occurs as a shortcut only; read_chain.py refuses it elsewhere
    g = image(draw, images, outer, 4 // stride, 8 // stride)
    expected = conv2d_input(x.shape, weight.float(), g.float(), stride, side // 2)
    more = {}
    if around == "sum":
        more["z"] = image(draw, *expected.shape)
        expected = expected + more["z"].float()
    if around == "shortcut":
        gradient, of = image(draw, images, 96, *g.shape[2:]), image(draw, 96, inner, 1, 1) / 8
        more["shortcut"] = (gradient, of, stride)
        expected = expected + conv2d_input(x.shape, of.float(), gradient.float(), stride)
    ours = conv.conv_back(g, weight, stride=stride, arrived=arrived, cut=cut, y=x, **more)
    assert torch.allclose(ours.float(), torch.where(x > 0, expected, 0.0), rtol=2e-3, atol=4e-3)
    assert not arrived.any()  # ready for the next launch


@pytest.mark.parametrize("channels", [1, 3])
def test_first_layer_and_pixel_step(channels):
    draw = torch.Generator().manual_seed(0)
    x = torch.rand(6, channels, 8, 4, generator=draw)
    rows = torch.tensor([4, 0, 3])
    weight = image(draw, 64, 8, 3, 3)
    weight[:, channels:].zero_()  # padding channels
    bias = torch.randn(64, generator=draw).half()
    exact = weight[:, :channels].float()
    ours = first_layer.stem(x, rows, weight, bias)
    assert torch.allclose(ours.float(), F.relu(F.conv2d(x[rows], exact, bias.float(), 1, 1)), rtol=2e-3, atol=2e-3)

    g = image(draw, 3, 64, 8, 4)
    gradient = first_layer.to_pixels(g, weight, channels)
    assert torch.allclose(gradient, conv2d_input((3, channels, 8, 4), exact, g.float(), 1, 1), rtol=1e-4, atol=1e-3)
    target = torch.tensor([4, 5, 1])  # 5 is the sink: this image has stopped
    numbers, step_index = torch.tensor([0.03, 0.01, 0.002]), torch.tensor([1])
    for kicks, project in ((None, True), (torch.randn(3, *x.shape, generator=draw), False)):
        start = (x + 0.02 * torch.randn(x.shape, generator=draw)).clamp(0, 1)
        ours, theirs = start.clone(), start.clone()
        first_layer.move_pixels(g, weight, ours, x, target, kicks, numbers, step_index, project=project)
        attack_step.move(theirs, x, kicks, gradient, target, numbers, step_index, project=project)
        assert torch.equal(ours, theirs)
        assert not torch.equal(ours[4], start[4]) and torch.equal(ours[5], start[5]) and torch.equal(ours[0], start[0])


def test_tiling_divides_the_work():
    for images in (1, 8, 16, 40, 128, 1000):
        for inner, outer, size, stride, back in [
            *((c, c, 2048 // c, 1, back) for c in (64, 128, 256, 512) for back in (False, True)),
            *((c, 2 * c, 2048 // c, 2, False) for c in (64, 128, 256)),
            *((2 * c, c, 1024 // c, 2, True) for c in (64, 128, 256)),
        ]:
            x = torch.empty(images, inner, size, size, device="meta")
            weight = torch.empty((inner, outer, 3, 3) if back else (outer, inner, 3, 3), device="meta")
            cut = conv.tiling(x, weight, stride=stride, back=back)
            assert outer % cut.outer == 0 and inner % cut.inner == 0
            places = images * size * size if back else images * size * size // stride**2
            tiles = (stride**2 if back else 1) * -(-places // cut.places) * (outer // cut.outer)
            assert cut.split == 1 or tiles <= 256  # the number of counters for split sums
            assert cut.split <= 9 * inner // 64
    assert conv.tiling(torch.empty(8, 512, 4, 4), torch.empty(512, 512, 3, 3), stride=1, back=False).split > 1


def gradients(network, x, output_gradient):
    point = x.clone().requires_grad_()
    logits = network(point)
    return logits.detach(), torch.autograd.grad(logits, point, output_gradient)[0]


def test_resnet18_is_read_as_a_chain(folded):
    ours, _ = folded(build("resnet18", num_classes=10))
    assert isinstance(ours.manual, ManualChain) and len(ours.manual.steps) == 16
    assert [place for place, step in enumerate(ours.manual.steps) if step.shortcut is not None] == [5, 9, 13]
    assert [step.added for step in ours.manual.steps[:4]] == [None, 0, None, 2]


def test_manual_residual_network_equals_autograd(folded):
    ours, plain = folded(Residual())
    assert len(ours.manual.steps) == 6
    draw = torch.Generator().manual_seed(0)
    x, output_gradient = torch.rand(2, 3, 8, 8, generator=draw), torch.randn(2, 10, generator=draw)
    (logits, gradient), (expected, their_gradient) = (
        gradients(network, x, output_gradient) for network in (ours, plain)
    )
    assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-5)
    assert torch.allclose(gradient, their_gradient, rtol=1e-3, atol=1e-5 * float(their_gradient.abs().max()))
    odd = torch.rand(1, 3, 9, 9, generator=draw)  # cannot be halved: autograd does it
    assert not ours.manual.takes(odd) and torch.allclose(ours(odd), plain(odd), rtol=1e-4, atol=1e-5)
    with pytest.raises(RuntimeError, match="channels"):
        ours(torch.rand(1, 1, 8, 8))
    assert ours.manual.takes(torch.empty(4096, 3, 32, 32, device="meta"))
    assert not ours.manual.takes(torch.empty(1024, 3, 224, 224, device="meta"))  # offsets exceed 32 bits


def test_manual_small_cnn_equals_autograd(folded):
    model = build("small_cnn", num_classes=10, size=(8, 8))
    ours, plain = folded(model)
    assert [type(step).__name__ for step in ours.manual.steps] == [
        *("Conv", "MaxPool", "Conv", "Conv", "MaxPool", "Conv", "Conv", "MaxPool", "Flat")
    ]
    assert ours.manual.steps[6].filter.weight.shape == (256, 256, 3, 3)  # 196 padded
    draw = torch.Generator().manual_seed(0)
    x, output_gradient = torch.rand(1, 3, 8, 8, generator=draw), torch.randn(1, 10, generator=draw)
    with torch.no_grad():  # an update, which refresh has to copy
        for parameter in model.parameters():
            parameter.mul_(1.1)
    for network in (ours, plain):
        network.refresh()
    (logits, gradient), (expected, their_gradient) = (
        gradients(network, x, output_gradient) for network in (ours, plain)
    )
    assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-5)
    assert torch.allclose(gradient, their_gradient, rtol=1e-3, atol=1e-5 * float(their_gradient.abs().max()))


@pytest.mark.parametrize("channels", [3, 16])
def test_max_pooling_forward_and_backward(channels):
    draw = torch.Generator().manual_seed(0)
    y = torch.randn(2, channels, 6, 4, generator=draw).relu()  # many zeros: ties, and inactive ReLUs
    y[0, 0, :2, :2] = 1.0  # a tie of the largest
    y = y.contiguous(memory_format=torch.channels_last)
    point = y.clone().requires_grad_()
    expected = F.max_pool2d(point, 2)
    assert torch.equal(pooling.max_pool(y), expected)
    g = torch.randn(expected.shape, generator=draw).contiguous(memory_format=torch.channels_last)
    (back,) = torch.autograd.grad(expected, point, g)
    assert torch.equal(pooling.max_pool_back(g, y), torch.where(y > 0, back, 0))


class Odd(nn.Module):
    """Networks that resemble the supported ones."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.stem = nn.Conv2d(3, 64, 3, padding=1)
        self.one = nn.Conv2d(64, 64, 3, padding=1, stride=2 if kind == "broadcast" else 1, bias=False)
        self.two = nn.Conv2d(64, 64, 3, padding=1, stride=2 if kind.startswith("late") else 1, bias=False)
        self.short = nn.Conv2d(64, 64, 1, stride=2 if kind in ("late stride", "1x1") else 1)
        self.flat = nn.Linear(64 * (64 if kind == "flat stem" else 16), 64)
        self.relu, self.last = nn.ReLU(), nn.Linear(64, 10)

    def forward(self, x):
        h = F.relu(self.stem(x))
        if self.kind == "flat stem":
            return self.last(self.relu(self.flat(h.flatten(1))))
        if self.kind == "dead end":
            pooled = F.max_pool2d(h, 2)
            flat = pooled.flatten(1)
            F.relu(self.one(pooled))
            return self.last(self.relu(self.flat(flat)))
        if self.kind == "1x1":
            return self.last(F.relu(self.short(h)).mean((2, 3)))
        k = F.relu(self.one(h))
        k = F.relu(self.two(k) + (h if "broadcast" in self.kind else self.short(h)))
        return self.last(k.mean((2, 3)))


@pytest.mark.parametrize("kind", ["flat stem", "dead end", "1x1", "late stride", "broadcast", "late broadcast"])
def test_similar_networks_are_left_to_autograd(monkeypatch, kind):
    monkeypatch.setattr(
        importlib.import_module("sparring.engine.manual.read_chain"),
        "convolutions_for",
        lambda device: (conv, first_layer, pooling),
    )
    torch.manual_seed(0)
    model = Odd(kind).eval()
    network = fold(model, dtype=torch.float32, fused=True)
    assert network.manual is None
    x = torch.rand(2, 3, *((2, 2) if "broadcast" in kind else (8, 8)))  # 2x2 and 1x1 are added by broadcasting
    assert torch.allclose(network(x), model(x), rtol=1e-4, atol=1e-5)


def test_shared_bias_is_added_once(folded):
    ours, plain = folded(Odd("shortcut"), norm=False)
    assert ours.manual.steps[1].shortcut is not None
    x = torch.rand(2, 3, 8, 8)
    expected = ours(x)
    for _ in range(2):
        ours.refresh()
        plain.refresh()
    assert torch.allclose(ours(x), expected) and torch.allclose(plain(x), expected, rtol=1e-4, atol=1e-5)


def test_manual_steps_equal_autograd_steps(folded):
    ours, plain = folded(OneBlock())
    assert ours.manual is not None
    draw = torch.Generator().manual_seed(1)
    x = torch.rand(5, 3, 4, 4, generator=draw)
    y = plain(x).argmax(dim=1)
    y[1] = (y[1] + 1) % 10  # misclassified from the start
    sets = []
    for network in (ours, plain):
        active = ActiveSet(
            6, (3, 4, 4), 10, steps=3, inner="ce", noise=False, project=True, device=CPU, kernels=attack_step
        )
        active.begin(x, y, x, tau=0, eps=0.1, step_size=0.03)
        for _ in range(3):
            active.step(network, 6)
        sets.append(active)
    manual, by_autograd = sets
    for name in ("backprops", "rows", "report", "serial"):
        assert torch.equal(getattr(manual, name), getattr(by_autograd, name)), name
    assert manual.backprops[1] == 0 and manual.backprops[0] > 0
    assert (manual.x_adv[:5] - by_autograd.x_adv[:5]).abs().gt(1e-6).float().mean() < 0.01  # signs of gradients near 0
    assert not torch.equal(manual.x_adv[0], x[0])


def test_replayed_network_equals_the_network(folded):
    ours, plain = folded(OneBlock())
    replayed = Replayed(ours, sizes=(4,))
    draw = torch.Generator().manual_seed(2)
    for _ in range(4):  # captured from the third on
        x, output_gradient = torch.rand(3, 3, 4, 4, generator=draw), torch.randn(3, 10, generator=draw)
        (logits, gradient), (expected, their_gradient) = (
            gradients(net, x, output_gradient) for net in (replayed, plain)
        )
        assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-5)
        assert torch.allclose(gradient, their_gradient, rtol=1e-3, atol=1e-5 * float(their_gradient.abs().max()))
    assert list(replayed.made) == [(4, 3, 4, 4)]


@pytest.mark.parametrize("kind", ["pooled", "twice"])
def test_unknown_networks_are_left_to_autograd(folded, kind):
    ours, plain = folded(OneBlock(kind))
    assert ours.manual is None
    x = torch.rand(2, 3, 8, 8)
    assert torch.allclose(ours(x), plain(x))


def test_pooling_backward_applies_the_relu_mask():
    draw = torch.Generator().manual_seed(0)
    h = torch.randn(3, 24, 4, 4, generator=draw).to(torch.bfloat16).to(memory_format=torch.channels_last)
    weight, output_gradient = torch.randn(10, 24, generator=draw).to(torch.bfloat16), torch.randn(3, 10, generator=draw)
    expected = torch.where(h > 0, fused_ops.pool_back(output_gradient, weight, h), 0)
    assert torch.equal(fused_ops.pool_back(output_gradient, weight, h, masked=True), expected)
    ours = pooling.pool_dense_back(output_gradient, weight, h, masked=True)
    assert torch.allclose(ours.float(), expected.float(), rtol=2**-6, atol=1e-3)
