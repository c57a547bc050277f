"""Networks rewritten for our batch-norm are the same networks; what cannot be rewritten is left as it is.

By Triton's interpreter on a CPU (tests/conftest.py).
"""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.grad import conv2d_weight

pytest.importorskip("triton", reason="the kernels need Triton, which pip install -e '.[dev]' brings on Linux")
if torch.cuda.is_available():
    pytest.skip("for the interpreter; on CUDA run benchmarks/check_engine.py", allow_module_level=True)

from sparring.engine.triton import batch_norm, pooling
from sparring.engine.update import fuse_bn
from sparring.models import build
from tests.engine.networks import Around, Before, Blocks, Chain, Padded, Uneven

pytestmark = pytest.mark.usefixtures("few_programs")
WIDE = {
    Padded: [4, 12],
    Chain: [4, 12],
    Blocks: [0, 0, 0, 8, 8, 8],
    Uneven: [0, 0, 0, 4, 6],
    Before: [0, 0, 0, 4, 4, 8],
    Around: [],
}
THROUGH = {Before: 2, Around: 1}
CASES = [
    (Chain, 14, 1),
    (Chain, 12, 2),
    (Blocks, 8, 0),
    (Uneven, 6, 0),
    (Before, 8, 0),
    (Around, 5, 0),
    (Padded, 12, 2),
]


def learned(model, network):
    """Its parameters, but for a layer that is not in use."""
    return [p for name, p in model.named_parameters() if not (network is Around and name.startswith("fc"))]


@pytest.mark.parametrize(("network", "side", "pools"), CASES)
def test_a_rewritten_network_is_the_same_network(network, side, pools, monkeypatch):
    torch.manual_seed(1)  # with 0 a value before a ReLU of Blocks is so near to 0 that rounding decides
    model = network().to(memory_format=torch.channels_last).train()
    ours, theirs = model, copy.deepcopy(model).double()
    graph = fuse_bn.fuse(ours, batch_norm, pooling)
    kinds = [type(module) for module in graph.modules()]
    count = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    bare = [module for module in graph.modules() if isinstance(module, fuse_bn.Bare)]
    filled = [module.of[0].in_channels for module in bare if module.fill]
    assert filled == ([] if network is Around else [3])  # the first layer, where it is on its own
    wide = [module.more for module in bare if module.more or not module.fill]
    assert sorted(wide) == WIDE[network]
    units = [module for module in graph.modules() if isinstance(module, fuse_bn.NormUnit)]
    assert sum(unit.through for unit in units) == THROUGH.get(network, 0)
    assert kinds.count(fuse_bn.NormUnit) == count and kinds.count(fuse_bn.PoolUnit) == (
        2 if network in (Chain, Padded) else 0
    )
    called = {node.target for node in graph.graph.nodes}
    assert network is Around or not called & {F.relu, F.max_pool2d, "relu"}
    # What a block reads is read by two, where batch-norm comes last; where it comes first, what its first one gives.
    assert sum(unit.twice for unit in units) == {Blocks: 3, Before: 1, Around: 1}.get(network, 0)
    used = []
    pool = pooling.max_pool
    monkeypatch.setattr(pooling, "max_pool", lambda x: used.append(x) or pool(x))
    for number in range(2):
        x = torch.rand(4, 3, side, side, generator=torch.Generator().manual_seed(number))
        out, expected = graph(x.to(memory_format=torch.channels_last)), theirs(x.double())
        assert torch.allclose(out.double(), expected, atol=1e-4)
        found = torch.autograd.grad(out.square().sum(), learned(ours, network))
        gradients = torch.autograd.grad(expected.square().sum(), learned(theirs, network))
        whole = sum(g.norm() ** 2 for g in gradients) ** 0.5
        for one, other in zip(found, gradients, strict=True):
            assert (one - other).norm() <= 1e-4 * whole
    assert len(used) == 2 * pools
    for (name, one), other in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert name.endswith("tracked") or torch.allclose(one.double(), other, atol=1e-5), name


def test_modes_are_the_layers_own():
    torch.manual_seed(0)
    model = Blocks().to(memory_format=torch.channels_last).train()
    graph = fuse_bn.fuse(model, batch_norm, pooling)
    x = torch.rand(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    graph(x)
    model.eval()
    before = copy.deepcopy(model.state_dict())
    assert torch.allclose(graph(x), model(x), atol=1e-5)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Leaky(nn.ReLU):
    def forward(self, x):
        return F.leaky_relu(x)


class Mixed(nn.Module):
    """What is near to a pattern and not it: another ReLU, a pooling of what no ReLU has passed, an uneven sum."""

    def __init__(self):
        super().__init__()
        self.conv1, self.bn1, self.leaky = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), Leaky()
        self.conv2, self.bn2 = nn.Conv2d(8, 10, 3, padding=1, bias=False), nn.BatchNorm2d(10)
        self.conv3, self.bn3 = nn.Conv2d(10, 10, 3, padding=1, bias=False), nn.BatchNorm2d(10)
        self.conv4 = nn.Conv2d(10, 5, 1, bias=False)

    def forward(self, x):
        h = self.leaky(self.bn1(self.conv1(x)))
        h = F.max_pool2d(self.bn2(self.conv2(h)), 2)
        h = F.relu(self.bn3(self.conv3(h)) + h)
        return self.conv4(h).mean((2, 3))


def test_what_is_near_to_a_pattern_is_not_taken_for_it():
    torch.manual_seed(0)
    ours = Mixed().to(memory_format=torch.channels_last).train()
    theirs = copy.deepcopy(ours).double()
    graph = fuse_bn.fuse(ours, batch_norm, pooling)
    units = [module for module in graph.modules() if isinstance(module, fuse_bn.NormUnit)]
    assert [unit.relu for unit in units] == [False, False, True]
    assert not any(isinstance(module, fuse_bn.PoolUnit) for module in graph.modules())
    assert [m.of[0] for m in graph.modules() if isinstance(m, fuse_bn.Bare)] == [ours.conv1]  # it is filled, no more
    x = torch.rand(4, 3, 8, 8)
    assert torch.allclose(graph(x.to(memory_format=torch.channels_last)).double(), theirs(x.double()), atol=1e-4)


@pytest.mark.parametrize("channels", [1, 3, 8])
def test_few_channels_are_filled_up_to_eight(channels, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)).train()
    graph = fuse_bn.fuse(model, batch_norm, pooling)
    read = []
    plain = nn.Conv2d._conv_forward
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", lambda conv, x, *more: read.append(x) or plain(conv, x, *more))
    x = torch.rand(4, channels, 8, 8).to(memory_format=torch.channels_last).requires_grad_()
    out = graph(x)
    assert [image.shape[1] for image in read] == [8] and read[0].is_contiguous(memory_format=torch.channels_last)
    expected = copy.deepcopy(model)(x)
    assert torch.allclose(out, expected, atol=1e-5)
    of_x, of_weight = torch.autograd.grad(out.square().sum(), (x, model[0].weight))
    (there,) = torch.autograd.grad(expected.square().sum(), x)
    assert torch.allclose(of_x, there, atol=1e-3) and of_weight.shape == model[0].weight.shape


@pytest.mark.parametrize(("channels", "numbers"), [(4, 2), (5, 1), (7, 1)])
def test_pixels_are_two_numbers_where_they_fit(channels, numbers):
    unit = fuse_bn.Bare(nn.Conv2d(channels, 16, 3).bfloat16(), wide=False)
    filled, copies = unit._filled(torch.rand(2, channels, 8, 8))
    assert filled.shape[1] == 8 and filled.is_contiguous(memory_format=torch.channels_last) and copies == numbers


def test_what_is_grouped_or_given_channels_is_not_filled():
    grouped = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1, groups=2, bias=False), nn.BatchNorm2d(8)).train()
    graph = fuse_bn.fuse(grouped, batch_norm, pooling)
    assert not any(isinstance(module, fuse_bn.Bare) and module.fill for module in graph.modules())
    unit = fuse_bn.Bare(conv := nn.Conv2d(3, 16, 3, bias=False), wide=False)
    unit.fill = True
    x = F.pad(torch.rand(2, 3, 8, 8), (0, 0, 0, 0, 0, 13))
    unit._filled = None
    torch.testing.assert_close(unit(x), conv(x[:, :3]))


@pytest.mark.parametrize("channels", [1, 3])
def test_pixels_keep_sixteen_bits_at_the_first_layer(channels):
    """bf16 alone would round a pixel near 1 to 1/256."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(channels, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)).train().bfloat16()
    model.to(memory_format=torch.channels_last)
    graph = fuse_bn.fuse(model, batch_norm, pooling)
    (unit,) = (module for module in graph.modules() if isinstance(module, fuse_bn.Bare))
    x = 0.5 + 0.5 * torch.rand(4, channels, 8, 8)
    weight = model[0].weight
    exact = F.conv2d(x.double(), weight.double(), padding=1)
    rounded = F.conv2d(x.bfloat16().double(), weight.double(), padding=1)
    out = unit(x)
    off = (out.double() - exact).norm()
    assert off <= 1.1 * (exact.bfloat16().double() - exact).norm() and (rounded - exact).norm() > 0.4 * off
    of_out = torch.randn(out.shape).bfloat16()
    (found,) = torch.autograd.grad((out * of_out).float().sum(), [weight])
    there = conv2d_weight(x.double(), weight.shape, of_out.double(), padding=1)
    (plain,) = torch.autograd.grad((F.conv2d(x.bfloat16(), weight, padding=1) * of_out).float().sum(), weight)
    assert (found.double() - there).norm() < 0.004 * there.norm() and found.is_contiguous(
        memory_format=torch.channels_last
    )
    assert (found.double() - there).norm() < 1.2 * (plain.double() - there).norm()


def wrong_forward(x, gain, shift, running, arrived, *, right, **how):
    held = [tensor.clone() for tensor in running]
    y, facts = right(x, gain, shift, running, arrived, **how)
    running[1].copy_(held[1] + (running[1] - held[1]) * 1.01)  # about what a biased variance would be
    return y, facts


def wrong_back(gradients, x, y, facts, arrived, *, right, **how):
    dx, kept, of_outs = right(gradients, x, y, facts, arrived, **how)
    of_outs[0] *= 7 / 8  # as if some rows had been lost
    return dx, kept, of_outs


def one_reader(gradients, *given, right, **how):
    return right(gradients[:1], *given, **how)


def nothing_through(gradients, *given, right, more, **how):
    return right(gradients, *given, **how)


WRONG = [
    ("forward", wrong_forward, Blocks),
    ("back", wrong_back, Blocks),
    ("back", one_reader, Blocks),
    ("back", nothing_through, Before),
    ("", None, Blocks),
    ("", None, Before),
]


@pytest.mark.parametrize(("name", "wrong", "network"), WRONG)
def test_layers_are_checked_one_by_one(name, wrong, network, monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(network(), nn.Dropout()).to(memory_format=torch.channels_last).train()
    model[0].blocks[1].eval()
    graph = fuse_bn.fuse(model, batch_norm, pooling)
    if wrong is not None:
        right = getattr(batch_norm, name)
        monkeypatch.setattr(batch_norm, name, lambda *given, **how: wrong(*given, right=right, **how))
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    random = torch.get_rng_state()
    x = torch.rand(8, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    assert (not fuse_bn.mismatch(graph, model, x)) == (wrong is None)
    assert torch.equal(random, torch.get_rng_state())
    assert modes == [module.training for module in model.modules()]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(module._forward_pre_hooks or getattr(module, "dry", False) for module in graph.modules())


@pytest.mark.parametrize("name", ["resnet18", "small_cnn", "wrn-10-1"])
def test_the_networks_of_the_paper(name):
    graph = fuse_bn.fuse(build(name, num_classes=10), batch_norm, pooling)
    assert graph is not None
    assert all(node.target is not F.relu for node in graph.graph.nodes)


def test_the_module_is_not_needed_without_triton():
    assert "triton" not in importlib.import_module("sparring.engine.update.fuse_bn").__dict__
