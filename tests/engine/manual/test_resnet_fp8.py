"""The ResNet in eight bits: near the network in fp32, and by kernels what it is in torch's operations.

The first layer is bf16, which its kernels cannot be in Triton's interpreter; it runs in torch's operations here.
"""

from __future__ import annotations

import importlib
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton", reason="the kernels need Triton, which pip install -e '.[dev]' brings on Linux")
if torch.cuda.is_available():
    pytest.skip("for the interpreter; on CUDA run benchmarks/check_fp8.py", allow_module_level=True)

from sparring.engine.attack.folded import fold, fused_mismatch
from sparring.engine.attack.runner import CapturedAttack
from sparring.engine.cuda_graphs import Captured
from sparring.engine.manual import fp8, fp8_simulated
from sparring.engine.manual.fp8 import in_fp8
from sparring.engine.manual.manual_network import with_autograd
from sparring.engine.manual.resnet_fp8 import Fp8ResNet
from sparring.engine.triton import attack_step, conv, fp8_conv, pooling
from sparring.models import build
from sparring.models.resnet import BasicBlock
from sparring.objectives import KTauPGD
from tests.engine.manual.eight_bits import drawn, gradients, same_up_to_size, turned
from tests.engine.recorded_graphs import simulate


class Wider(nn.Module):
    """A residual block with 100 channels inside."""

    def __init__(self):
        super().__init__()
        self.one, self.norm1 = nn.Conv2d(64, 100, 3, padding=1, bias=False), nn.BatchNorm2d(100)
        self.two, self.norm2 = nn.Conv2d(100, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)

    def forward(self, x):
        return F.relu(self.norm2(self.two(F.relu(self.norm1(self.one(x))))) + x)


class Residual(nn.Module):
    """A short ResNet: identities, and a shortcut with stride 2."""

    def __init__(self, *blocks):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64), nn.ReLU())
        self.blocks = nn.Sequential(
            *(blocks or (BasicBlock(64, 64, 1), BasicBlock(64, 128, 2), BasicBlock(128, 128, 1)))
        )
        self.linear = nn.Linear(128, 10)

    def forward(self, x):
        return self.linear(self.blocks(self.stem(x)).mean((2, 3)))


class FirstLayer:
    """What triton/first_layer.py does, in torch's operations."""

    @staticmethod
    def stem(x, rows, weight, bias):
        split = torch.cat([x[rows].bfloat16(), (x[rows] - x[rows].bfloat16().float()).bfloat16()], 1)
        out = F.conv2d(split, weight[:, : split.shape[1]], bias, padding=1).relu()
        return out.contiguous(memory_format=torch.channels_last)

    @staticmethod
    def to_pixels(gradient, weight, channels):
        return F.conv_transpose2d(gradient.float(), weight[:, :channels].float(), padding=1)

    @classmethod
    def move_pixels(cls, gradient, weight, x_adv, x, target, kicks, *numbers, project):
        attack_step.move(x_adv, x, kicks, cls.to_pixels(gradient, weight, 3), target, *numbers, project=project)


@pytest.fixture
def made(monkeypatch):
    """A model with statistics, folded in bf16 with its hand-written network."""
    monkeypatch.setattr(
        importlib.import_module("sparring.engine.manual.read_chain"),
        "convolutions_for",
        lambda device: (conv, FirstLayer, pooling),
    )

    def make(model=None, side=8):
        torch.manual_seed(0)
        model = model or Residual()
        with torch.no_grad():
            for norm in model.modules():
                if isinstance(norm, nn.BatchNorm2d) and norm.affine:
                    norm.weight.uniform_(-1.5, 1.5)
                    norm.bias.uniform_(-0.5, 0.5)
                    norm.momentum = 1.0
            model.train()(torch.rand(16, 3, side, side))
        return model.eval(), fold(model, dtype=torch.bfloat16, fused=True)

    return make


def test_it_is_near_the_network_in_fp32(made):
    model, folded = made()
    ours = Fp8ResNet(folded.manual, fp8_simulated)
    with torch.no_grad():  # an update, which makes weights much larger
        for parameter in model.parameters():
            parameter.mul_(3)
        model.train()(torch.rand(16, 3, 8, 8))
        model.eval()
    folded.refresh()
    ours.refresh()
    x, output_gradient = drawn()
    output_gradient *= torch.tensor([1.0, 1e-6, 1e3, 1.0, 1.0])[:, None]  # of a size that e5m2 has not
    expected, their_gradient = gradients(model, x, output_gradient)
    logits, gradient = gradients(partial(with_autograd, ours), x, output_gradient)
    assert (logits - expected).norm() < 0.1 * expected.norm()
    assert turned(gradient, their_gradient) < 0.15
    sizes = gradient.flatten(1).norm(dim=1) / their_gradient.flatten(1).norm(dim=1)
    assert ((sizes > 0.8) & (sizes < 1.25)).all()


def test_the_built_in_resnet(made):
    """All stages of ResNet-18; nothing that it passes on is as large as the largest number of e4m3."""
    model, folded = made(build("resnet18", num_classes=10), side=16)
    ours = Fp8ResNet(folded.manual, fp8_simulated)
    x, output_gradient = drawn(3, 16)
    expected, their_gradient = gradients(model, x, output_gradient)
    logits, gradient = gradients(partial(with_autograd, ours), x, output_gradient)
    assert (logits - expected).norm() < 0.3 * expected.norm()
    gained = (gradient.sign() * their_gradient).sum() / their_gradient.abs().sum()
    assert gained > 0.4  # untrained; bf16 gains 0.94
    _, values = ours.forward(x, torch.arange(3))
    assert all(0.1 < value.float().max() < 448 for value in values)


def test_the_kernels_are_the_network_in_torchs_operations(made, rounds):
    """Both passes, and the backward pass of fewer images."""
    _, folded = made()
    ours = Fp8ResNet(folded.manual, fp8_conv)
    theirs = ours.simulated()
    for one, other in zip(ours.convs.twos, theirs.convs.twos, strict=True):
        assert torch.equal(one.ahead.float(), other.ahead.float()) and one.ahead.float().any()
        assert torch.equal(one.back.float(), other.back.float()) and one.back.float().abs().max() == 448
    x, output_gradient = drawn()
    (logits, gradient), (expected, their_gradient) = (
        gradients(partial(with_autograd, network), x, output_gradient) for network in (ours, theirs)
    )
    assert (logits - expected).norm() < 0.01 * expected.norm()
    assert turned(gradient, their_gradient) < 0.01
    rows, among = torch.tensor([4, 3, 2, 1, 0]), torch.tensor([3, 0], dtype=torch.int32)
    again, values = ours.forward(x, rows)
    assert torch.equal(again, logits[rows])
    some = ours.to_pixels(ours.back(output_gradient[rows], values, among))
    torch.testing.assert_close(some, gradient[rows][among])
    unsized = ours.to_pixels(ours.back(output_gradient[rows], values, among, sized=False))
    assert same_up_to_size(unsized, some)


def test_it_is_checked_before_it_is_trusted(made, rounds, monkeypatch):
    model, folded = made(Residual(BasicBlock(64, 64, 1), BasicBlock(64, 128, 2)), side=4)
    monkeypatch.setattr(fp8, "fp8_for", lambda device: fp8_conv)
    x, _ = drawn(3, 4)
    folded.manual = in_fp8(folded.manual, x)
    assert isinstance(folded.manual, Fp8ResNet)
    assert not fused_mismatch(folded, model, x)
    really = fp8_conv.conv_sum_relu
    monkeypatch.setattr(fp8_conv, "conv_sum_relu", lambda *given, **more: really(*given, **more | {"added": None}))
    assert "less exact" in fused_mismatch(folded, model, x)


def test_it_is_captured(made, monkeypatch):
    """Refreshing the weights and both passes make the host wait for nothing; a replay reads weights and images anew."""
    model, folded = made()
    ours = Fp8ResNet(folded.manual, fp8_simulated)
    x, output_gradient = drawn()
    place, rows, among = x.clone(), torch.arange(len(x)), torch.tensor([3, 0], dtype=torch.int32)
    kept = {}

    def work():
        folded.refresh()
        ours.refresh()
        kept["logits"], values = ours.forward(place, rows)
        kept["gradient"] = ours.to_pixels(ours.back(output_gradient, values, among))

    graphs = simulate(monkeypatch)
    captured = Captured(work, "pool")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.3)
    place.copy_(x.flip(0))
    captured()
    found = {name: tensor.clone() for name, tensor in kept.items()}
    work()
    assert graphs.overwritten and all(torch.equal(found[name], kept[name]) and found[name].any() for name in kept)


def test_a_whole_attack(made, rounds):
    """Steps in which some stop, in halves; the images that it leaves fool the network in fp32 where it says so."""
    model, folded = made(Residual(BasicBlock(64, 128, 2)))
    folded.manual = Fp8ResNet(folded.manual, fp8_conv)
    x, _ = drawn(6)
    y = folded(x).argmax(dim=1)
    y[::2] = (y[::2] + 1) % 10
    pgd = KTauPGD(eps=0.1, step_size=0.03, steps=2, tau=0, loss="ce", start=None)
    runner = CapturedAttack(folded, 8, (3, 8, 8), 10, device=torch.device("cpu"), every=4, kernels=attack_step)
    found = runner(pgd, x, y, torch.Generator())
    assert (found.backprops[::2] == 0).all() and (found.backprops[1::2] >= 1).all()
    moved = (found.x_adv - x).abs().amax((1, 2, 3))
    assert (moved[::2] == 0).all() and (moved[1::2] > 0.02).all() and moved.max() <= 0.1 + 1e-6
    assert F.cross_entropy(model(found.x_adv), y) > F.cross_entropy(model(x), y)


def test_what_it_takes(made, monkeypatch):
    plain = made()[1].manual
    x = torch.empty(2, 3, 8, 8)
    assert "needs a GPU" in in_fp8(plain, x)
    monkeypatch.setattr(fp8, "fp8_for", lambda device: fp8_simulated)
    ours = in_fp8(plain, x)
    for side, fits in ((2, False), (4, True), (8, True), (12, False), (64, True), (128, False)):
        assert ours.takes(torch.empty(2, 3, side, side)) == fits
    assert not ours.takes(torch.empty(2, 1, 8, 8)) and not ours.takes(x, images=2**26)
    uneven = Residual(BasicBlock(64, 128, 1))
    narrow = Residual(Wider(), BasicBlock(64, 128, 2))
    for model, why in ((uneven, "stride 2"), (narrow, "multiples of 64")):
        assert why in in_fp8(made(model)[1].manual, x)
    bare = Residual()
    bare.blocks[0].bn2 = nn.BatchNorm2d(64, affine=False)
    assert "with weights" in in_fp8(made(bare)[1].manual, x)
    assert "residual blocks" in in_fp8(made(build("small_cnn", num_classes=10), side=32)[1].manual, x)
