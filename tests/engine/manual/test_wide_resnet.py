"""The hand-written wide ResNet is the network: both passes, fewer images backward, whole attacks (interpreter)."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton", reason="the kernels need Triton, which pip install -e '.[dev]' brings on Linux")
if torch.cuda.is_available():
    pytest.skip("for the interpreter; on CUDA run benchmarks/check_engine.py", allow_module_level=True)

from sparring.engine.attack.folded import fold, fused_mismatch
from sparring.engine.attack.runner import CapturedAttack
from sparring.engine.attack.split_batch import SplitBatch
from sparring.engine.folded_layers import ScaleShift
from sparring.engine.manual import wide_resnet
from sparring.engine.manual.wide_resnet import ManualWideResNet
from sparring.engine.triton import attack_step, pointwise
from sparring.models import build
from sparring.objectives import KTauPGD

CPU = torch.device("cpu")
SIDES = dict.fromkeys(("stretched", "shortcut stride"), (2, 2))  # 2x2 and 1x1 are added by stretching


@pytest.fixture
def both(monkeypatch):
    """A network folded twice: hand-written, and by autograd."""

    def make(model, dtype=torch.float32):
        torch.manual_seed(0)
        with torch.no_grad():
            for norm in model.modules():
                if isinstance(norm, nn.BatchNorm2d):
                    norm.weight.uniform_(-1.5, 1.5)
                    norm.bias.uniform_(-0.5, 0.5)
            model.train()(torch.rand(8, 3, *SIDES.get(getattr(model, "kind", ""), (8, 8))))
        plain = fold(model, dtype=dtype, fused=True)
        assert plain.manual is None  # a CPU
        monkeypatch.setattr(wide_resnet, "kernels_for", lambda device: attack_step)
        monkeypatch.setattr(wide_resnet, "pointwise_for", lambda device: pointwise)
        ours = fold(model, dtype=dtype, fused=True)
        return (network.to(memory_format=torch.channels_last) for network in (ours, plain))

    return make


def close(ours, theirs):
    return torch.allclose(ours, theirs, rtol=1e-3, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("name", ["wrn-16-2", "wrn-10-1"])  # without a shortcut, the first batch-norm stands alone
def test_both_ways(both, name):
    model = build(name, num_classes=10)
    ours, plain = both(model)
    assert isinstance(ours.manual, ManualWideResNet)
    with torch.no_grad():  # an update: all weights are taken over anew
        for parameter in model.parameters():
            parameter.mul_(1.1)
    draw = torch.Generator().manual_seed(0)
    x, output_gradient = torch.rand(5, 3, 8, 8, generator=draw), torch.randn(5, 10, generator=draw)
    found = []
    for network in (ours, plain):
        network.refresh()
        point = x.clone().requires_grad_()
        logits = network(point)
        found.append((logits.detach(), torch.autograd.grad(logits, point, output_gradient)[0]))
    (logits, gradient), (expected, their_gradient) = found
    assert close(logits, expected) and close(gradient, their_gradient)
    among = torch.tensor([3, 0, 4], dtype=torch.int32)
    rows = torch.tensor([4, 3, 2, 1, 0])
    logits, values = ours.manual.forward(x, rows)
    assert close(logits, expected[rows])
    some = ours.manual.to_pixels(ours.manual.back(output_gradient[rows], values, among))
    assert close(some, their_gradient[rows][among])


def test_both_ways_in_bf16(both):
    """As on a GPU: pixels come as two numbers each, sums are rounded as autograd rounds them."""
    ours, plain = both(build("wrn-10-2", num_classes=10), torch.bfloat16)
    draw = torch.Generator().manual_seed(0)
    x, output_gradient = torch.rand(4, 3, 8, 8, generator=draw), torch.randn(4, 10, generator=draw)
    assert ours.manual.stem.split and ours.manual.takes(x) and not ours.manual.takes(torch.rand(4, 8, 8, 8))
    found = []
    for network in (ours, plain):
        point = x.clone().requires_grad_()
        logits = network(point)
        found.append((logits.detach(), torch.autograd.grad(logits, point, output_gradient)[0]))
    (logits, gradient), (expected, their_gradient) = found
    assert logits.dtype == torch.float32 and gradient.shape == x.shape
    assert (logits - expected).norm() < 0.01 * expected.norm()
    assert (gradient - their_gradient).norm() < 0.1 * their_gradient.norm()


def test_a_sum_is_rounded_before_it_is_scaled():
    """As where it is written down in between: what a shortcut brings is the same number for both who read it."""
    first, second = (torch.full((1, 1, 1, 1), value, dtype=torch.bfloat16) for value in (256.0, 1.0))
    scale, shift = (torch.full((1,), value, dtype=torch.bfloat16) for value in (1.0, -255.0))
    assert float(pointwise.norm_relu(first, second, scale, shift)) == 1.0  # 257 is 256 in bf16


def test_what_it_takes(both):
    ours, plain = both(build("wrn-10-1", num_classes=10))
    assert ours.manual.takes(torch.empty(2, 3, 9, 7)) and not ours.manual.takes(torch.empty(2, 1, 8, 8))
    assert not ours.manual.takes(torch.empty(2, 3, 8, 8).double()) and not ours.manual.takes(torch.empty(3, 8, 8))
    for odd in (torch.rand(2, 3, 9, 7), torch.rand(0, 3, 8, 8)):
        assert close(ours(odd), plain(odd)) if len(odd) else ours(odd).shape == (0, 10)


def test_a_fault_in_the_backward_pass_of_fewer_images_is_seen(both, monkeypatch):
    model = build("wrn-10-1", num_classes=10)
    ours, _ = both(model)
    x = torch.rand(3, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert not fused_mismatch(ours, model.eval(), x)
    really = pointwise.norm_relu_back

    def fails(*given, among=None, **more):
        if among is not None:
            raise RuntimeError("out of resources")
        return really(*given, **more)

    monkeypatch.setattr(pointwise, "norm_relu_back", fails)
    assert fused_mismatch(ours, model, x)


def test_more_images_than_a_second_axis_counts():
    """CUDA numbers blocks up to 65,535 on every axis but the first."""
    many = torch.ones(70_000, 1, 1, 1)
    grid = pointwise._grid(many)
    assert grid == (70_000,)
    assert pointwise._grid(torch.ones(3, 2, 700, 1)) == (2 * 3,)
    assert pointwise.relu_back(many[:0], None, many[:0]).shape == (0, 1, 1, 1)


def test_a_whole_attack_in_parts(both, monkeypatch):
    """Steps run in parts; the one in which most stop in halves, and whole."""
    ours, plain = both(build("wrn-10-1", num_classes=10))
    sizes = []
    really = ManualWideResNet.forward
    monkeypatch.setattr(
        ManualWideResNet, "forward", lambda self, x, rows: sizes.append(len(rows)) or really(self, x, rows)
    )
    draw = torch.Generator().manual_seed(3)
    x = torch.rand(8, 3, 8, 8, generator=draw)
    y = plain(x).argmax(dim=1)
    y[::2] = (y[::2] + 1) % 10
    pgd = KTauPGD(eps=0.1, step_size=0.02, steps=4, tau=1, loss="ce", start="uniform", noise=0.001)
    found, halved = [], []
    for network, modules in ((SplitBatch(ours, CPU, {8: (5, 3), 4: (2, 2)}), attack_step), (plain, None)):
        attack = CapturedAttack(network, 8, (3, 8, 8), 10, device=CPU, every=4, kernels=modules)
        got = attack(pgd, x, y, torch.Generator().manual_seed(0))
        found.append((got.x_adv.clone(), got.backprops.clone()))
        (made,) = attack.made.values()
        halved.append(made.check is not None)
    (x_adv, backprops), (their_x_adv, their_backprops) = found
    assert halved == [True, False]
    assert sizes[:3] == [5, 3, 8]  # the first step in parts, then the check of all
    assert set(sizes[3:]) <= {5, 3, 2}  # and again in parts
    assert torch.equal(backprops, their_backprops) and 0 < int((backprops == 1).sum()) < 8
    assert ((x_adv - their_x_adv).abs() > 1e-5).float().mean() < 0.01  # signs of nearly nothing


class Odd(nn.Module):
    """Networks that look like wide ResNets, and are not, but for two."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        groups, channels = 2 if "grouped" in kind else 1, 1 if kind == "one channel" else 8
        self.stem = nn.Conv2d(3, channels, 3, padding=1, bias=kind == "bias", stride=2 if kind == "stem stride" else 1)
        self.norm, self.last_norm = nn.BatchNorm2d(channels), nn.BatchNorm2d(8)
        self.one = nn.Conv2d(
            channels,
            8,
            3,
            padding=1,
            bias=False,
            stride=2 if kind in ("stretched", "shortcut stride") else 1,
            groups=groups if kind == "grouped one" else 1,
        )
        padding, bias = 2 if kind == "wider" else 1, kind == "bias of two"
        self.two = nn.Conv2d(8, 8, 3, padding=padding, bias=bias, groups=groups if kind == "grouped two" else 1)
        narrow = kind == "narrow shortcut"
        self.short = nn.Conv2d(channels, 1 if narrow else 8, 1, bias=kind == "bias of shortcut")
        self.middle, self.behind, self.fc = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.Linear(8, 10)

    def forward(self, x):
        total = self.stem(x)
        o = F.silu(self.norm(total)) if self.kind == "silu" else F.relu(self.norm(total))
        h = self.middle(self.one(o))
        if self.kind == "one adds":
            h = h + o
        if self.kind != "no relu":
            h = F.relu(h)
        if self.kind == "wider":
            h = h[:, :, 1:-1, 1:-1]
        h = self.two(h)
        if self.kind == "norm of two":
            h = self.behind(h)
        short = "shortcut" in self.kind or self.kind in ("both", "one channel")
        h = h + (o if self.kind == "after" else self.short(o) if short else total)
        if self.kind == "both":
            h = h + total
        if self.kind == "twice":
            h = h + self.short(o)
        h = F.relu(self.last_norm(h))
        if self.kind == "squared":
            h = h * h
        if self.kind == "mean of lines":
            return self.fc(h.mean((2,)).mean(2))
        if self.kind == "mean of channels":  # as many as there are lines
            return self.fc(h.mean((1, 2)))
        if self.kind == "kept mean":
            return self.fc(h.mean((2, 3), keepdim=True).flatten(1))
        if self.kind == "no head":
            return h.mean((2, 3))
        logits = self.fc(h.amax((2, 3)) if self.kind == "largest" else h.mean((2, 3)))
        return 2 * logits if self.kind == "doubled" else logits


class Second(Odd):
    """A forward with another argument, which is never given."""

    def forward(self, x, unused=None):
        return super().forward(x)


KNOWN = ("plain", "shortcut")
KINDS = (
    *KNOWN,
    *("bias", "silu", "after", "both", "twice", "squared", "largest", "stretched", "wider", "stem stride"),
    *("grouped one", "grouped two", "bias of two", "bias of shortcut", "narrow shortcut", "shortcut stride"),
    *("one channel", "one adds", "no relu", "norm of two", "mean of lines", "kept mean", "no head", "doubled"),
    "mean of channels",
    "second argument",
)


@pytest.mark.parametrize("kind", KINDS)
def test_networks_that_resemble_one_are_left_to_autograd(both, kind):
    model = Second(kind) if kind == "second argument" else Odd(kind)
    ours, _ = both(model)
    assert (ours.manual is not None) == (kind in KNOWN)
    x = torch.rand(2, 3, *SIDES.get(kind, (8, 8)))
    assert torch.allclose(ours(x), model.eval()(x), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_batch_norms_in_one_launch(monkeypatch, dtype):
    model = build("wrn-10-2", num_classes=10)
    for number, norm in enumerate(module for module in model.modules() if isinstance(module, nn.BatchNorm2d)):
        norm.eps = 0.1 * (number + 1)
    with torch.no_grad():
        model.train()(torch.rand(4, 3, 8, 8))
    network = fold(model, dtype=dtype, fused=False)
    norms = [unit for unit in network.units if isinstance(unit, ScaleShift)]
    expected = [(unit.scale.clone(), unit.shift.clone()) for unit in norms]
    for unit in norms:
        unit.scale.zero_()
        unit.shift.fill_(7)
    for name, module in (("kernels_for", attack_step), ("pointwise_for", pointwise)):
        monkeypatch.setattr(
            importlib.import_module("sparring.engine.attack.folded"), name, lambda device, module=module: module
        )
    monkeypatch.setattr(attack_step, "_BLOCK", 8192)  # the interpreter is slow at loops
    network.refreshed_at_once = None
    network.refresh()
    assert network.refreshed_at_once[1].issuperset(norms) and len(norms) == 3
    for unit, (scale, shift) in zip(norms, expected, strict=True):
        assert torch.allclose(unit.scale, scale, rtol=2**-7) and torch.allclose(
            unit.shift, shift, rtol=2**-7, atol=1e-4
        )


@pytest.mark.parametrize(
    ("norm", "dtype"),
    [
        (nn.BatchNorm2d(8), torch.float16),  # of twice the bytes, if it were written as fp32
        (nn.BatchNorm2d(8), torch.float64),
        (nn.BatchNorm2d(8).half(), torch.float32),
        (nn.BatchNorm2d(8, affine=False), torch.float32),
    ],
    ids=["half", "double", "half norm", "no weights"],
)
def test_a_batch_norm_of_another_precision_is_refreshed_alone(norm, dtype):
    unit = ScaleShift(norm, dtype=dtype)
    assert ScaleShift(nn.BatchNorm2d(8), dtype=torch.float32).in_a_row and not unit.in_a_row
    unit.refresh()
    assert torch.allclose(unit.scale.float(), torch.full((1, 8, 1, 1), (1 + norm.eps) ** -0.5), atol=1e-3)


@pytest.mark.parametrize("name", ["wrn-10-1-silu", "preact_resnet18"])
def test_networks_that_are_built_in_and_not_wide_relu_ones_are_left_to_autograd(both, name):
    model = build(name, num_classes=10)
    if name == "preact_resnet18":
        model = nn.Sequential(
            model.conv1, model.layer1, model.layer2[0], model.layer2[0].shortcut[0].__class__(128, 8, 1)
        )
        model.append(nn.AdaptiveAvgPool2d(1)).append(nn.Flatten())
    ours, plain = both(model)
    assert ours.manual is None
    x = torch.rand(2, 3, 8, 8)
    expected = model.eval()(x)
    assert close(ours(x), expected) and close(plain(x), expected)
