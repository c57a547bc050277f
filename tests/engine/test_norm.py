"""Batch-norm by Triton computes what torch's does, both ways, and networks rewritten to use it train alike.

By Triton's interpreter on a CPU (tests/conftest.py), in fp32 and fp16.
"""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

pytest.importorskip("triton", reason="the kernels need Triton, which pip install -e '.[dev]' brings on Linux")
if torch.cuda.is_available():
    pytest.skip("for the interpreter; on CUDA run benchmarks/gpu_engine_check.py", allow_module_level=True)

from sparring.engine import norm, norms, pooling
from sparring.models import build
from sparring.models.resnet import BasicBlock


def image(draw, *shape, dtype=torch.float32):
    return torch.randn(shape, generator=draw).to(dtype).contiguous(memory_format=torch.channels_last)


def layer(draw, channels, *, mean=0.0):
    made = nn.BatchNorm2d(channels, eps=1e-4, momentum=0.3)
    with torch.no_grad():
        made.weight.copy_(torch.randn(channels, generator=draw))
        made.bias.copy_(torch.randn(channels, generator=draw))
        made.running_mean.copy_(mean + torch.randn(channels, generator=draw))
        made.running_var.copy_(torch.rand(channels, generator=draw) + 0.5)
    return made


def unit(of, *, bias=None, relu=False, twice=False):
    made = norms.NormUnit(of, bias, norm, torch.zeros(256, dtype=torch.int32))
    made.relu, made.twice = relu, twice
    return made


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    shape=st.sampled_from([(2, 64, 6, 8), (3, 40, 2, 2), (1, 4, 5, 2), (5, 196, 8, 8), (16, 32, 1, 1)]),
    relu=st.booleans(),
    adds=st.booleans(),
    twice=st.booleans(),
    biased=st.booleans(),
    programs=st.sampled_from([1, 5, 528]),
)
def test_both_ways_equal_torch(seed, shape, relu, adds, twice, biased, programs):
    draw = torch.Generator().manual_seed(seed)
    channels = shape[1]
    ours, theirs = layer(draw, channels, mean=3.0), None
    theirs = copy.deepcopy(ours).double()
    x = (image(draw, *shape) + 3).requires_grad_()
    z = image(draw, *shape).requires_grad_() if adds else None
    bias = torch.randn(channels, generator=draw).requires_grad_() if biased else None
    slopes = [image(draw, *shape) for _ in range(2 if twice else 1)]
    made = unit(ours, bias=bias, relu=relu, twice=twice)
    before, norm._PROGRAMS = norm._PROGRAMS, programs
    try:
        y = made(x, z)
        outs = y if twice else (y,)
        wanted = [t for t in (x, ours.weight, ours.bias, bias, z) if t is not None]
        found = torch.autograd.grad(outs, wanted, slopes)
    finally:
        norm._PROGRAMS = before
    assert type(outs[0].grad_fn).__name__.startswith(("_Norm", "View")) and not made.arrived.any()

    exact = [None if t is None else t.detach().double().requires_grad_() for t in (x, bias, z)]
    read = exact[0] if bias is None else exact[0] + exact[1][:, None, None]
    expected = theirs(read) if z is None else theirs(read) + exact[2]
    # Both sides are to pass the same: what is zero but for rounding is not in question.
    expected = torch.where(outs[0] > 0, expected, 0.0) if relu else expected
    inputs = [t for t in (exact[0], theirs.weight, theirs.bias, exact[1], exact[2]) if t is not None]
    gradients = torch.autograd.grad(expected, inputs, sum(slopes).double())
    for out in outs:
        assert out.is_contiguous(memory_format=torch.channels_last)
        assert torch.allclose(out.double(), expected, atol=1e-4)
    if relu:
        assert (outs[0] >= 0).all()
    for one, other in zip(found, gradients, strict=True):
        assert one.shape == other.shape
        assert (one - other).norm() <= 1e-4 * other.norm() + 1e-3 * sum(slopes).norm() / len(x)
    if bias is not None:
        assert not found[3].any()
    assert torch.allclose(ours.running_mean.double(), theirs.running_mean, atol=1e-5)
    assert torch.allclose(ours.running_var.double(), theirs.running_var, rtol=1e-4)


def test_a_mean_far_from_zero_costs_no_digits():
    draw = torch.Generator().manual_seed(0)
    ours = layer(draw, 32)  # nor do running statistics that know nothing of it
    x = image(draw, 8, 32, 8, 8) + 1000
    expected = F.batch_norm(x.double(), None, None, ours.weight.double(), ours.bias.double(), True, eps=ours.eps)
    assert torch.allclose(unit(ours)(x).double(), expected, atol=1e-3)


@pytest.mark.parametrize("why", ["eval", "layout", "one row"])
def test_what_the_kernels_do_not_take_is_torchs(why, monkeypatch):
    monkeypatch.setattr(norm, "forward", None)
    draw = torch.Generator().manual_seed(0)
    ours, theirs = layer(draw, 8), None
    x, z = (
        image(draw, 1 if why == "one row" else 4, 8, 1 if why == "one row" else 4, 1 if why == "one row" else 4),
        None,
    )
    z = torch.randn(x.shape, generator=draw)
    bias = torch.randn(8, generator=draw)
    if why == "layout":
        x = x.contiguous()
    if why != "layout":
        ours.eval()
    theirs = copy.deepcopy(ours)
    one, two = unit(ours, bias=bias, relu=True, twice=True)(x, z)
    assert one is two and torch.allclose(one, F.relu(theirs(x + bias[:, None, None]) + z), atol=1e-5)


class Chain(nn.Module):
    """Convolutions with biases, and poolings of even and odd sides."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.conv2, self.bn2, self.relu = nn.Conv2d(12, 20, 3, padding=1), nn.BatchNorm2d(20), nn.ReLU()
        self.fc = nn.Linear(20 * 9, 5)

    def forward(self, x):
        h = F.max_pool2d(F.relu(self.bn1(self.conv1(x))), 2)
        h = F.max_pool2d(self.relu(self.bn2(self.conv2(h))), 2, 2)
        return self.fc(h.flatten(1))


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        self.blocks = nn.Sequential(BasicBlock(8, 8, 1), BasicBlock(8, 40, 2), BasicBlock(40, 40, 1))
        self.fc = nn.Linear(40, 5)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


class Uneven(nn.Module):
    """Channels that are no whole sixteens, read by convolutions with and without a bias, grouped, and by nobody."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 10, 3, padding=1, bias=False), nn.BatchNorm2d(10)
        self.conv2, self.bn2 = nn.Conv2d(10, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
        self.conv3, self.bn3 = nn.Conv2d(12, 20, 3, padding=1), nn.BatchNorm2d(20)
        self.conv4, self.bn4 = nn.Conv2d(20, 10, 3, padding=1, groups=2), nn.BatchNorm2d(10)
        self.conv5, self.bn5 = nn.Conv2d(10, 6, 3, padding=1), nn.BatchNorm2d(6)
        self.conv6 = nn.Conv2d(6, 5, 1)

    def forward(self, x):
        for number in range(1, 6):
            x = F.relu(getattr(self, f"bn{number}")(getattr(self, f"conv{number}")(x)))
        return self.conv6(x).mean((2, 3))


WIDE = {Chain: [4, 12], Blocks: [0, 0, 0, 8, 8, 8], Uneven: [0, 0, 0, 4, 6]}  # channels more


@pytest.mark.parametrize(("network", "side", "pools"), [(Chain, 14, 1), (Chain, 12, 2), (Blocks, 8, 0), (Uneven, 6, 0)])
def test_a_rewritten_network_is_the_same_network(network, side, pools, monkeypatch):
    torch.manual_seed(0)
    model = network().to(memory_format=torch.channels_last).train()
    ours, theirs = model, copy.deepcopy(model).double()
    graph = norms.fuse(ours, norm, pooling)
    kinds = [type(module) for module in graph.modules()]
    count = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    wide = [module.more for module in graph.modules() if isinstance(module, norms.Bare)]
    assert sorted(wide) == WIDE[network]
    assert kinds.count(norms.NormUnit) == count and kinds.count(norms.PoolUnit) == (2 if network is Chain else 0)
    called = {node.target for node in graph.graph.nodes}
    assert not called & {F.relu, F.max_pool2d, "relu"}
    if network is Blocks:  # what a block reads is read by two
        assert sum(module.twice for module in graph.modules() if isinstance(module, norms.NormUnit)) == 3
    used = []
    pool = pooling.max_pool
    monkeypatch.setattr(pooling, "max_pool", lambda x: used.append(x) or pool(x))
    for number in range(3):
        x = torch.rand(4, 3, side, side, generator=torch.Generator().manual_seed(number))
        out, expected = graph(x.to(memory_format=torch.channels_last)), theirs(x.double())
        assert torch.allclose(out.double(), expected, atol=1e-4)
        found = torch.autograd.grad(out.square().sum(), list(ours.parameters()))
        gradients = torch.autograd.grad(expected.square().sum(), list(theirs.parameters()))
        whole = sum(g.norm() ** 2 for g in gradients) ** 0.5
        for one, other in zip(found, gradients, strict=True):
            assert (one - other).norm() <= 1e-4 * whole
    assert len(used) == 3 * pools
    for (name, one), other in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert name.endswith("tracked") or torch.allclose(one.double(), other, atol=1e-5), name


def test_modes_are_the_layers_own():
    torch.manual_seed(0)
    model = Blocks().to(memory_format=torch.channels_last).train()
    graph = norms.fuse(model, norm, pooling)
    x = torch.rand(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    graph(x)
    model.eval()
    before = copy.deepcopy(model.state_dict())
    assert torch.allclose(graph(x), model(x), atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Asks(Chain):
    def forward(self, x):
        return super().forward(x if self.training else x + 1)


class Weighs(Chain):
    def forward(self, x):
        return super().forward(x) + self.fc.bias


class Branches(Chain):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class Alone(Chain):
    """A batch-norm that no convolution stands before, or not alone."""

    def forward(self, x):
        h = self.conv1(x)
        return self.bn1(h) + h


class NoBatchNorm(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten())


@pytest.mark.parametrize("network", [Asks, Weighs, Branches, Alone, NoBatchNorm])
def test_what_cannot_be_rewritten_is_left(network):
    model = network().train()
    modes = {name: module.training for name, module in model.named_modules()}
    assert norms.fuse(model, norm, pooling) is None
    assert modes == {name: module.training for name, module in model.named_modules()}


@pytest.mark.parametrize("change", ["momentum", "affine", "statistics", "instance"])
def test_unusual_batch_norms_are_left(change):
    model = Chain().train()
    model.bn2 = {
        "momentum": nn.BatchNorm2d(20, momentum=None),
        "affine": nn.BatchNorm2d(20, affine=False),
        "statistics": nn.BatchNorm2d(20, track_running_stats=False),
        "instance": nn.InstanceNorm2d(20, affine=True, track_running_stats=True),
    }[change]
    assert norms.fuse(model, norm, pooling) is None


@pytest.mark.parametrize(("name", "fits"), [("resnet18", True), ("small_cnn", True), ("wrn-10-1", False)])
def test_the_networks_of_the_paper(name, fits):
    graph = norms.fuse(build(name, num_classes=10), norm, pooling)
    assert (graph is not None) == fits
    if fits:
        assert all(node.target is not F.relu for node in graph.graph.nodes)


def test_the_module_is_not_needed_without_triton():
    assert "triton" not in importlib.import_module("sparring.engine.norms").__dict__
