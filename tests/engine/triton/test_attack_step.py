"""The Triton kernels compute what their plain twins compute: by Triton's interpreter on a CPU (tests/conftest.py)."""

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

from sparring.engine.attack.active_set import ActiveSet
from sparring.engine.attack.folded import ConvUnit, fold
from sparring.engine.attack.runner import CapturedAttack
from sparring.engine.manual import fused_ops
from sparring.engine.triton import attack_step, pointwise, pooling
from sparring.models.resnet import BasicBlock
from sparring.objectives import KTauPGD

CPU = torch.device("cpu")
BATCH, SHAPE, CLASSES, STEPS = 9, (1, 5, 5), 3, 6


def sets(inner, noise, project, seed):
    """The same batch twice: once for the kernels, once for their twins; and a network that is easily fooled."""
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(CLASSES, 25, generator=draw)
    x = torch.rand(BATCH, *SHAPE, generator=draw)

    def network(points):
        return points.flatten(1) @ weight.T

    y = network(x).argmax(dim=1)
    y[::4] = (y[::4] + 1) % CLASSES  # some are wrong from the start
    made = []
    for module in (attack_step, None):
        active = ActiveSet(
            BATCH, SHAPE, CLASSES, steps=STEPS, inner=inner, noise=noise, project=project, device=CPU, kernels=module
        )
        count = BATCH - 2  # a partial batch
        start = (x + 0.01).clamp(0, 1)
        active.begin(x[:count], y[:count], start[:count], tau=1, eps=0.2, step_size=0.04, noise=0.01)
        if active.kicks is not None:
            active.kicks.copy_(torch.randn(active.kicks.shape, generator=torch.Generator().manual_seed(seed)))
        if active.natural is not None:
            active.natural[:BATCH].copy_(network(x))
        made.append(active)
    return network, made


@pytest.mark.parametrize(
    ("inner", "noise", "project"), [("ce", False, True), ("ce", True, False), ("kl", True, True), ("kl", False, False)]
)
def test_an_attack_step_by_step(inner, noise, project):
    network, (by_kernels, plain) = sets(inner, noise, project, seed=3)
    seen = set()
    size = BATCH
    for _ in range(STEPS):
        for active in (by_kernels, plain):
            active.step(network, size)
        for name in ("rows", "tau_left", "backprops", "serial", "report", "step_index", "y", "slots"):
            ours, theirs = getattr(by_kernels, name)[:BATCH], getattr(plain, name)[:BATCH]
            assert torch.equal(ours, theirs), name
        assert torch.allclose(by_kernels.x_adv[:BATCH], plain.x_adv[:BATCH], rtol=0, atol=2e-7)
        assert torch.equal(by_kernels.target[:size], plain.target[:size])
        size = max(plain.read()[1], 1)
        seen.add(size)
    assert len(seen) > 1  # the set has shrunk on the way


@pytest.mark.parametrize("start", ["uniform", "normal", None])
@pytest.mark.parametrize("project", [False, True])
def test_a_beginning_at_random(start, project):
    _, pair = sets("ce", noise=True, project=project, seed=0)
    draw = torch.Generator().manual_seed(5)
    x, y = torch.rand(BATCH - 3, *SHAPE, generator=draw), torch.randint(0, CLASSES, (BATCH - 3,), generator=draw)
    x[0] = 1.0  # at the edge of the pixels' range
    for active in pair:
        drawn = torch.Generator().manual_seed(7)
        numbers = {"tau": 2, "eps": 0.1, "step_size": 0.03, "noise": 0.02}
        active.begin_at_random(x, y, start=start, generator=drawn, **numbers)
    by_kernels, plain = pair
    count = len(x)
    for name in ("x", "x_adv", "y"):
        assert torch.equal(getattr(by_kernels, name)[:count], getattr(plain, name)[:count]), name
    for name in ("tau_left", "backprops", "rows", "step_index", "numbers"):
        assert torch.equal(getattr(by_kernels, name), getattr(plain, name)), name
    assert torch.equal(by_kernels.kicks[:, :count], plain.kicks[:, :count])
    assert torch.equal(plain.x[:count], x) and (start is None) == torch.equal(plain.x_adv[:count], x)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 10_000), tau=st.integers(0, 3), every=st.integers(1, 5))
def test_a_whole_attack(seed, tau, every):
    _, (active, _) = sets("ce", noise=False, project=True, seed=seed)
    x, y = active.x[:BATCH].clone(), active.y[:BATCH].clone()
    model = nn.Sequential(nn.Flatten(), nn.Linear(25, CLASSES, bias=False))
    model[1].weight.data.copy_(torch.randn(CLASSES, 25, generator=torch.Generator().manual_seed(seed)))
    attack = CapturedAttack(model, BATCH, SHAPE, CLASSES, device=CPU, every=every, kernels=attack_step)
    pgd = KTauPGD(eps=0.2, step_size=0.04, steps=STEPS, tau=tau, loss="ce", start="uniform")
    ours = attack(pgd, x, y, torch.Generator().manual_seed(1))
    plain = pgd(model, x, y, torch.Generator().manual_seed(1))
    assert torch.equal(ours.backprops, plain.backprops)
    assert torch.allclose(ours.x_adv, plain.x_adv, rtol=0, atol=1e-6)


@pytest.mark.parametrize("inner", ["ce", "kl"])
def test_judge_gives_the_gradient_of_the_loss(inner):
    draw = torch.Generator().manual_seed(0)
    logits = 5 * torch.randn(7, 10, generator=draw)
    natural = torch.randn(9, 10, generator=draw)
    rows, label = torch.tensor([8, 1, 2, 5, 4, 0, 3]), torch.randint(0, 10, (9,), generator=draw)
    wrong = torch.zeros(7, dtype=torch.int32)
    output_gradient = attack_step.judge(logits, natural if inner == "kl" else None, rows, label, wrong)
    leaf = logits.clone().requires_grad_()
    if inner == "ce":
        F.cross_entropy(leaf, label[rows], reduction="sum").backward()
    else:
        F.kl_div(leaf.log_softmax(1), natural[rows].softmax(1), reduction="sum").backward()
    assert torch.allclose(output_gradient, leaf.grad, atol=1e-6)
    assert torch.equal(wrong.bool(), logits.argmax(dim=1) != label[rows])


def test_split_keeps_sixteen_bits():
    x = torch.rand(3, 3, 5, 7, generator=torch.Generator().manual_seed(0))
    pairs = attack_step.split(x, 8)
    assert pairs.is_contiguous(memory_format=torch.channels_last)
    assert (pairs[:, :3].float() + pairs[:, 3:6].float() - x).abs().max() < 2**-15
    assert not pairs[:, 6:].any()
    # The interpreter cuts where a GPU rounds: the halves may differ by a unit in the last place, not their sum.
    assert (pairs.float() - fused_ops.split(x, 8).float()).abs().max() <= 2**-8


def test_relu_back():
    draw = torch.Generator().manual_seed(0)
    first, second, y = (torch.randn(2, 3, 40, 9, generator=draw).to(torch.bfloat16) for _ in range(3))
    ours = pointwise.relu_back(first, second, y)
    expected = torch.where(y > 0, first.float() + second.float(), 0.0)
    assert torch.allclose(ours.float(), expected, rtol=2**-7)


def residual() -> nn.Module:
    """ResNet-18's layers, few of them: the interpreter is slow."""
    stem = [nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU()]
    blocks = [BasicBlock(16, 16, 1), BasicBlock(16, 32, 2), BasicBlock(32, 64, 2)]
    return nn.Sequential(*stem, *blocks, nn.Flatten(), nn.Linear(64 * 64, 10))


def test_all_convolutions_fold_in_one_launch(monkeypatch):
    torch.manual_seed(0)
    model = residual()
    with torch.no_grad():
        model.train()(torch.rand(4, 3, 32, 32))
    model.to(memory_format=torch.channels_last)
    folded = fold(model, dtype=torch.bfloat16, fused=True)
    units = [unit for unit in folded.units if isinstance(unit, ConvUnit)]
    assert all(unit.in_a_row for unit in units) and units[0].split
    expected = [(unit.weight.clone(), unit.bias.clone()) for unit in units]
    for unit in units:
        unit.weight.zero_()
        unit.bias.zero_()
    for name, module in (("kernels_for", attack_step), ("pointwise_for", pointwise)):
        monkeypatch.setattr(
            importlib.import_module("sparring.engine.attack.folded"), name, lambda device, module=module: module
        )
    monkeypatch.setattr(attack_step, "_BLOCK", 8192)  # the interpreter is slow at loops
    folded.refreshed_at_once = None
    for _ in range(2):  # a shared bias is added once, however often
        folded.refresh()
    assert len(folded.refreshed_at_once[1]) == len(units) and len(folded.shared_biases) == 2
    for unit, (weight, bias) in zip(units, expected, strict=True):
        assert torch.allclose(unit.weight.float(), weight.float(), rtol=2**-7, atol=1e-6)
        assert torch.allclose(unit.bias.float(), bias.float(), rtol=2**-6, atol=2e-3)


@pytest.mark.parametrize(("channels", "size", "classes"), [(24, (4, 4), 10), (130, (2, 3), 3), (16, (1, 1), 100)])
def test_pooling_and_the_last_layer(channels, size, classes):
    draw = torch.Generator().manual_seed(0)
    h = torch.randn(5, channels, *size, generator=draw).to(torch.bfloat16).to(memory_format=torch.channels_last)
    weight = torch.randn(classes, channels, generator=draw).to(torch.bfloat16)
    bias = torch.randn(classes, generator=draw).to(torch.bfloat16)
    point = h.clone().requires_grad_()
    plain = fused_ops.pool_dense(point, weight, bias)
    assert torch.allclose(pooling.pool_dense(h, weight, bias), plain, rtol=1e-4, atol=1e-4)
    gradient = torch.randn(plain.shape, generator=draw)
    (expected,) = torch.autograd.grad(plain, point, gradient)
    ours = pooling.pool_dense_back(gradient, weight, h)
    assert ours.stride() == h.stride()
    assert torch.allclose(ours.float(), expected.float(), rtol=2**-6, atol=1e-3)
