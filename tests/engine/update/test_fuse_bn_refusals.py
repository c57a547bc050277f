"""Networks that cannot be rewritten for the batch-norm kernels are refused."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytest.importorskip("triton", reason="the kernels need Triton, which pip install -e '.[dev]' brings on Linux")
if torch.cuda.is_available():
    pytest.skip("for the interpreter; on CUDA run benchmarks/check_engine.py", allow_module_level=True)

from sparring.engine.attack.folded import NotFolded, fold
from sparring.engine.triton import batch_norm, pooling
from sparring.engine.update import fuse_bn
from tests.engine.networks import Chain


class Asks(Chain):
    def forward(self, x):
        return super().forward(x if self.training else x + 1)


class Weighs(Chain):
    def forward(self, x):
        return super().forward(x) + self.fc.bias


class Branches(Chain):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else x


class NoBatchNorm(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten())


class ByName(Chain):
    def forward(self, x):
        return F.relu(self.bn1(input=self.conv1(x)))


class Twice(Chain):
    """One layer in two places: the order of its statistics' updates must not change."""

    def forward(self, x):
        return F.relu(self.bn1(self.conv1(x)) + self.bn1(self.conv1(2 * x)))


class FailsInTraining(Chain):
    def forward(self, x):
        if self.training:
            raise NotImplementedError
        return super().forward(x)


class Hooked(Chain):
    def __init__(self, kind="register_forward_hook", layer="relu"):
        super().__init__()
        getattr(getattr(self, layer), kind)(lambda *given: None)


class HookedAhead(Hooked):
    def __init__(self):
        super().__init__("register_forward_pre_hook", "conv1")


class HookedBehind(Hooked):
    def __init__(self):
        super().__init__("register_full_backward_hook", "bn2")


class Overwrites(Chain):
    """A sum in place."""

    def forward(self, x):
        h = self.conv1(x)
        y = self.bn1(h)
        y.add_(h)
        return F.relu(y).mean((2, 3))


class OverwritesByModule(Chain):
    def __init__(self):
        super().__init__()
        self.leaky = nn.LeakyReLU(inplace=True)

    def forward(self, x):
        y = self.bn1(self.conv1(x))
        return (self.leaky(y) + y.sigmoid()).mean((2, 3))


class OverwritesByArgument(Chain):
    def forward(self, x):
        z = self.bn1(self.conv1(x))
        y = z.tanh()
        F.relu(z, inplace=True)
        return F.relu(y + z).mean((2, 3))


OVERWRITE = [Overwrites, OverwritesByModule, OverwritesByArgument]
LEFT = [
    *OVERWRITE,
    Asks,
    Weighs,
    Branches,
    NoBatchNorm,
    ByName,
    Twice,
    FailsInTraining,
    Hooked,
    HookedAhead,
    HookedBehind,
]


@pytest.mark.parametrize("network", [*LEFT, *OVERWRITE])
def test_unfusable_networks_are_refused(network):
    model = network().train()
    modes = {name: module.training for name, module in model.named_modules()}
    with pytest.raises(fuse_bn.NotFused):
        fuse_bn.fuse(model, batch_norm, pooling)
    assert modes == {name: module.training for name, module in model.named_modules()}


@pytest.mark.parametrize("network", OVERWRITE)
def test_in_place_writes_are_not_folded(network):
    with pytest.raises(NotFolded, match="in place"):
        fold(network().eval(), dtype=torch.float32, fused=False)


def test_convolution_called_by_keyword_is_kept():
    class ByKeyword(Chain):
        def forward(self, x):
            return F.relu(self.bn2(self.conv2(input=F.relu(self.bn1(self.conv1(x)))))).mean((2, 3))

    torch.manual_seed(0)
    model = ByKeyword().to(memory_format=torch.channels_last).train()
    other = copy.deepcopy(model)
    graph = fuse_bn.fuse(model, batch_norm, pooling)
    x = torch.rand(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    assert torch.allclose(graph(x), other(x), atol=1e-5)


@pytest.mark.parametrize("change", ["momentum", "affine", "statistics", "instance"])
def test_unusual_batch_norms_are_refused(change):
    model = Chain().train()
    model.bn2 = {
        "momentum": nn.BatchNorm2d(20, momentum=None),
        "affine": nn.BatchNorm2d(20, affine=False),
        "statistics": nn.BatchNorm2d(20, track_running_stats=False),
        "instance": nn.InstanceNorm2d(20, affine=True, track_running_stats=True),
    }[change]
    with pytest.raises(fuse_bn.NotFused):
        fuse_bn.fuse(model, batch_norm, pooling)
