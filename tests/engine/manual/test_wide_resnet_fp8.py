"""The wide ResNet in eight bits: near the network in fp32, and by kernels what it is in torch's operations."""

from __future__ import annotations

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
from sparring.engine.manual import fp8, fp8_simulated, wide_resnet
from sparring.engine.manual.fp8 import in_fp8
from sparring.engine.manual.manual_network import with_autograd
from sparring.engine.manual.wide_resnet_fp8 import Fp8WideResNet
from sparring.engine.triton import attack_step, available, fp8_conv, pointwise
from sparring.models import build
from sparring.objectives import KTauPGD
from tests.engine.manual.eight_bits import drawn, gradients, same_up_to_size, turned
from tests.engine.recorded_graphs import simulate

CPU = torch.device("cpu")


@pytest.fixture
def made(monkeypatch):
    """A model with statistics, folded in bf16 with its hand-written network."""
    monkeypatch.setattr(wide_resnet, "kernels_for", lambda device: attack_step)
    monkeypatch.setattr(wide_resnet, "pointwise_for", lambda device: pointwise)

    def make(name="wrn-10-2", side=8):
        torch.manual_seed(0)
        model = build(name, num_classes=10)
        with torch.no_grad():
            for norm in model.modules():
                if isinstance(norm, nn.BatchNorm2d):
                    norm.weight.uniform_(-1.5, 1.5)
                    norm.bias.uniform_(-0.5, 0.5)
                    norm.momentum = 1.0
            model.train()(torch.rand(16, 3, side, side))
        return model.eval(), fold(model, dtype=torch.bfloat16, fused=True)

    return make


@pytest.mark.parametrize(("name", "slack"), [("wrn-10-2", 0.15), ("wrn-16-4", 0.3)])
def test_it_is_near_the_network_in_fp32(made, name, slack):
    model, folded = made(name)
    ours = Fp8WideResNet(folded.manual, fp8_simulated)
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
    assert (logits - expected).norm() < 0.15 * expected.norm()
    assert turned(gradient, their_gradient) < slack
    sizes = gradient.flatten(1).norm(dim=1) / their_gradient.flatten(1).norm(dim=1)
    assert ((sizes > 0.7) & (sizes < 1.4)).all()


def test_the_kernels_are_the_network_in_torchs_operations(made, rounds):
    """Both passes, and the backward pass of fewer images."""
    _, folded = made()
    ours = Fp8WideResNet(folded.manual, fp8_conv)
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
    model, folded = made()
    monkeypatch.setattr(fp8, "fp8_for", lambda device: fp8_conv)
    x, _ = drawn(3)
    folded.manual = in_fp8(folded.manual, x)
    assert isinstance(folded.manual, Fp8WideResNet)
    assert not fused_mismatch(folded, model, x)
    really = fp8_conv.conv_back_sum

    def wrong(*given, **more):
        return [each.float().flip(-1).to(each.dtype) for each in really(*given, **more)]

    monkeypatch.setattr(fp8_conv, "conv_back_sum", wrong)
    assert "too coarse" in fused_mismatch(folded, model, x)
    monkeypatch.setattr(fp8_conv, "conv_back_sum", really)
    some = fp8_conv.conv_sum
    monkeypatch.setattr(fp8_conv, "conv_sum", lambda *given, **more: some(*given, **more | {"added": None}))
    assert "less exact" in fused_mismatch(folded, model, x)
    monkeypatch.setattr(fp8_conv, "conv_sum", None)
    assert "fail on this device" in fused_mismatch(folded, model, x)


def test_it_is_captured(made, monkeypatch):
    """Refreshing the weights and both passes make the host wait for nothing; a replay reads weights and images anew."""
    model, folded = made()
    monkeypatch.setattr(pointwise, "relu_back", relu_back)
    ours = Fp8WideResNet(folded.manual, fp8_simulated)
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


def relu_back(first, second, y, among=None):
    """In torch's operations, which a simulated graph records."""
    return torch.where((y if among is None else y[among]) > 0, first + second, 0)


def test_a_whole_attack(made, rounds):
    """Steps in which some stop, in halves; the images that it leaves fool the network in fp32 where it says so."""
    model, folded = made()
    folded.manual = Fp8WideResNet(folded.manual, fp8_conv)
    x, _ = drawn(6)
    y = folded(x).argmax(dim=1)
    y[::2] = (y[::2] + 1) % 10
    pgd = KTauPGD(eps=0.1, step_size=0.03, steps=2, tau=0, loss="ce", start=None)
    runner = CapturedAttack(folded, 8, (3, 8, 8), 10, device=CPU, every=4, kernels=attack_step)
    found = runner(pgd, x, y, torch.Generator())
    assert (found.backprops[::2] == 0).all() and (found.backprops[1::2] >= 1).all()
    moved = (found.x_adv - x).abs().amax((1, 2, 3))
    assert (moved[::2] == 0).all() and (moved[1::2] > 0.02).all() and moved.max() <= 0.1 + 1e-6
    assert F.cross_entropy(model(found.x_adv), y) > F.cross_entropy(model(x), y)


def test_what_it_takes(made, monkeypatch):
    _, folded = made()
    plain = folded.manual
    x = torch.empty(2, 3, 8, 8)
    assert "needs a GPU" in in_fp8(plain, x)
    monkeypatch.setattr(fp8, "fp8_for", lambda device: fp8_simulated)
    assert "hand-written" in in_fp8(None, x)
    ours = in_fp8(plain, x)
    for side, fits in ((4, False), (8, True), (12, False), (32, True), (128, False)):
        assert ours.takes(torch.empty(2, 3, side, side)) == fits
        assert isinstance(in_fp8(plain, torch.empty(2, 3, side, side)), Fp8WideResNet) == fits
    assert not ours.takes(torch.empty(2, 1, 8, 8)) and not ours.takes(x, images=2**28)
    for name, why in (("wrn-10-1", "first block"), ("wrn-10-3", "multiples of 32")):
        assert why in in_fp8(made(name)[1].manual, x)


def test_where_there_is_no_fp8(monkeypatch):
    assert available.fp8_for(CPU) == "fp8 needs a GPU"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    assert "9.0" in available.fp8_for(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert available.fp8_for(torch.device("cuda")) is fp8_conv
