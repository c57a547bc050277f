"""A wide ResNet by hand is itself: forward, back, for some of its images, in whole attacks. By Triton's interpreter."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton", reason="the kernels need Triton, which pip install -e '.[dev]' brings on Linux")
if torch.cuda.is_available():
    pytest.skip("for the interpreter; on CUDA run benchmarks/gpu_engine_check.py", allow_module_level=True)

from sparring.engine import kernels, pointwise, wide
from sparring.engine.fold import fold
from sparring.engine.parts import Parted
from sparring.engine.units import ScaleShift
from sparring.engine.walk import FastWalk
from sparring.engine.wide import WidePasses
from sparring.models import build

CPU = torch.device("cpu")


@pytest.fixture
def folded(monkeypatch):
    """A network folded in fp32: by hand, and by autograd."""

    def make(model):
        torch.manual_seed(0)
        with torch.no_grad():
            for norm in model.modules():
                if isinstance(norm, nn.BatchNorm2d):
                    norm.weight.uniform_(-1.5, 1.5)
                    norm.bias.uniform_(-0.5, 0.5)
            model.train()(
                torch.rand(8, 3, 2, 2) if getattr(model, "kind", "") == "stretched" else torch.rand(8, 3, 8, 8)
            )
        plain = fold(model, dtype=torch.float32, fused=True)
        assert plain.passes is None  # a CPU
        monkeypatch.setattr(wide, "kernels_for", lambda device: kernels)
        monkeypatch.setattr(wide, "pointwise_for", lambda device: pointwise)
        ours = fold(model, dtype=torch.float32, fused=True)
        return (network.to(memory_format=torch.channels_last) for network in (ours, plain))

    return make


def close(ours, theirs):
    return torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("name", ["wrn-16-2", "wrn-10-1"])  # without a shortcut, the first batch-norm stands alone
def test_both_ways(folded, name):
    model = build(name, num_classes=10)
    ours, plain = folded(model)
    assert isinstance(ours.passes, WidePasses)
    with torch.no_grad():  # an update: all weights are taken over anew
        for parameter in model.parameters():
            parameter.mul_(1.1)
    draw = torch.Generator().manual_seed(0)
    x, slope = torch.rand(5, 3, 8, 8, generator=draw), torch.randn(5, 10, generator=draw)
    found = []
    for network in (ours, plain):
        network.refresh()
        point = x.clone().requires_grad_()
        logits = network(point)
        found.append((logits.detach(), torch.autograd.grad(logits, point, slope)[0]))
    (logits, gradient), (expected, their_gradient) = found
    assert close(logits, expected) and close(gradient, their_gradient)
    among = torch.tensor([3, 0, 4], dtype=torch.int32)
    rows = torch.tensor([4, 3, 2, 1, 0])
    logits, values = ours.passes.forward(x, rows)
    assert close(logits, expected[rows])
    some = ours.passes.to_pixels(ours.passes.back(slope[rows], values, among))
    assert close(some, their_gradient[rows][among])


def test_what_it_takes(folded):
    ours, plain = folded(build("wrn-10-1", num_classes=10))
    assert ours.passes.takes(torch.empty(2, 3, 9, 7)) and not ours.passes.takes(torch.empty(2, 1, 8, 8))
    assert not ours.passes.takes(torch.empty(2, 3, 8, 8).double())
    assert not ours.passes.takes(torch.empty(1, 3, 8, 8), 2**16)
    odd = torch.rand(2, 3, 9, 7)
    assert close(ours(odd), plain(odd))


def test_a_whole_attack_in_parts(folded):
    """Steps run in parts; the one in which most stop in halves, and whole."""
    ours, plain = folded(build("wrn-10-1", num_classes=10))
    draw = torch.Generator().manual_seed(3)
    x = torch.rand(8, 3, 8, 8, generator=draw)
    y = plain(x).argmax(dim=1)
    y[::2] = (y[::2] + 1) % 10
    setting = {"eps": 0.1, "step_size": 0.02, "steps": 4, "tau": 1, "loss": "ce", "start": "uniform"}
    setting |= {"noise": 0.001, "project": True}
    found, looks = [], []
    for network, modules in ((Parted(ours, CPU, {8: (5, 3), 4: (2, 2)}), kernels), (plain, None)):
        walk = FastWalk(network, 8, (3, 8, 8), 10, device=CPU, every=4, kernels=modules)
        got = walk(network, x, y, generator=torch.Generator().manual_seed(0), **setting)
        found.append((got.x_adv.clone(), got.backprops.clone()))
        (bench,) = walk.made.values()
        looks.append(bench.look is not None)
    (x_adv, backprops), (their_x_adv, their_backprops) = found
    assert looks == [True, False]
    assert torch.equal(backprops, their_backprops) and 0 < int((backprops == 1).sum()) < 8
    assert ((x_adv - their_x_adv).abs() > 1e-5).float().mean() < 0.01  # signs of nearly nothing


class Odd(nn.Module):
    """Networks that look like wide ResNets, and are not."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=kind == "bias")
        self.norm, self.last_norm = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.one = nn.Conv2d(8, 8, 3, padding=1, bias=False, stride=2 if kind == "stretched" else 1)
        self.two = nn.Conv2d(8, 8, 3, padding=2 if kind == "wider" else 1, bias=False)
        self.middle, self.short, self.fc = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1, bias=False), nn.Linear(8, 10)

    def forward(self, x):
        total = self.stem(x)
        o = F.silu(self.norm(total)) if self.kind == "silu" else F.relu(self.norm(total))
        h = F.relu(self.middle(self.one(o)))
        if self.kind == "wider":
            h = h[:, :, 1:-1, 1:-1]
        h = self.two(h) + (o if self.kind == "after" else self.short(o) if self.kind == "both" else total)
        if self.kind == "both":
            h = h + total
        if self.kind == "twice":
            h = h + self.short(o)
        h = F.relu(self.last_norm(h))
        if self.kind == "squared":
            h = h * h
        return self.fc(h.amax((2, 3)) if self.kind == "largest" else h.mean((2, 3)))


KINDS = ("plain", "bias", "silu", "after", "both", "twice", "squared", "largest", "stretched", "wider")


@pytest.mark.parametrize("kind", KINDS)
def test_what_only_looks_like_one_is_left_to_autograd(folded, kind):
    model = Odd(kind)
    ours, _ = folded(model)
    assert (ours.passes is not None) == (kind == "plain")
    x = torch.rand(2, 3, *((2, 2) if kind == "stretched" else (8, 8)))  # 2x2 and 1x1 are added by stretching
    assert torch.allclose(ours(x), model.eval()(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_batch_norms_in_one_launch(monkeypatch, dtype):
    model = build("wrn-10-2", num_classes=10)
    with torch.no_grad():
        model.train()(torch.rand(4, 3, 8, 8))
    network = fold(model, dtype=dtype, fused=False)
    norms = [unit for unit in network.units if isinstance(unit, ScaleShift)]
    expected = [(unit.scale.clone(), unit.shift.clone()) for unit in norms]
    for unit in norms:
        unit.scale.zero_()
        unit.shift.fill_(7)
    for name, module in (("kernels_for", kernels), ("pointwise_for", pointwise)):
        monkeypatch.setattr(importlib.import_module("sparring.engine.fold"), name, lambda device, module=module: module)
    monkeypatch.setattr(kernels, "_BLOCK", 8192)  # the interpreter is slow at loops
    network.at_once = None
    network.refresh()
    assert network.at_once[1].issuperset(norms) and len(norms) == 3
    for unit, (scale, shift) in zip(norms, expected, strict=True):
        assert torch.allclose(unit.scale, scale, rtol=2**-7) and torch.allclose(
            unit.shift, shift, rtol=2**-7, atol=1e-4
        )
