"""Small networks to be rewritten: chains, residual blocks, batch-norm before and after a convolution, odd widths."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from sparring.models.resnet import BasicBlock
from sparring.models.wide_resnet import Block


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
    """Channel counts that are not multiples of 16, before convolutions with and without a bias, grouped, and none."""

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


class Before(nn.Module):
    """Batch-norm before the convolution, as in wide ResNets: a shortcut reads its input, too."""

    def __init__(self, classes=5):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.blocks = nn.Sequential(Block(8, 8, 1), Block(8, 12, 2), Block(12, 12, 1))
        self.bn, self.fc = nn.BatchNorm2d(12), nn.Linear(12, classes)

    def forward(self, x):
        return self.fc(F.relu(self.bn(self.blocks(self.stem(x)))).mean((2, 3)))


class Around(Chain):
    """A batch-norm with two readers, one of which also reads its input; and one whose input has another reader."""

    def forward(self, x):
        h = self.conv1(x)
        y = self.bn1(h)
        h = F.relu(y + h) * y.sigmoid()
        h = self.conv2(h)
        h = h.tanh() + self.bn2(h)
        return h.mean((2, 3))


class Padded(Chain):
    """Convolutions whose padding is not a number of zeros, and a ReLU that writes in place."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 12, 3, padding=1, padding_mode="reflect", bias=False)
        self.conv2 = nn.Conv2d(12, 20, 3, padding="same", bias=False)
        self.relu = nn.ReLU(inplace=True)


class Residual(nn.Module):
    """The first blocks of a ResNet-18: all its kinds of layers, few enough for Triton's interpreter."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.BatchNorm2d(64)
        self.blocks = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.last = nn.Linear(128, 10)

    def forward(self, x):
        return self.last(self.blocks(F.relu(self.norm(self.conv(x)))).mean((2, 3)))


class OneBlock(nn.Module):
    """A residual network of one block, small enough for whole attacks in the interpreter; `kind` breaks the pattern."""

    def __init__(self, kind="plain"):
        super().__init__()
        self.kind = kind
        self.stem, self.norm = nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64)
        self.one, self.two = nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)
        self.last = nn.Linear(64, 10)

    def forward(self, x):
        h = self.norm(self.stem(x)).relu()
        k = torch.relu(self.one(h))
        if self.kind == "pooled":
            k = F.avg_pool2d(k, 1)
        k = torch.relu(self.two(k) + h)
        if self.kind == "twice":
            k = torch.relu(self.one(k) + h)
        return self.last(k.mean((2, 3)))


class Plainest(nn.Module):
    """A convolution, a batch-norm and a linear layer; the base of networks that a path of the engine refuses."""

    def __init__(self, padding=1):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(1, 8, 3, padding=padding), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8 * 36, 4)

    def features(self, x):
        return F.relu(self.bn(self.conv(x)))

    def forward(self, x):
        return self.fc(self.features(x).flatten(1))


class Syncs(Plainest):
    """Its forward waits for the device: it can be neither traced nor captured."""

    def forward(self, x):
        h = self.features(x)
        return self.fc((h * (1.0 + 0.0 * float(h.detach().abs().amax()))).flatten(1))


class SyncsInGraph(Plainest):
    """The same, written so that tracing succeeds: the folded graph waits for the device too."""

    def forward(self, x):
        h = self.features(x)
        return self.fc((h * (1.0 + 0.0 * h.detach().abs().amax().item())).flatten(1))


class Branches(Plainest):
    """Control flow that depends on the data."""

    def forward(self, x):
        return super().forward(x if torch.isfinite(x).all() else x.nan_to_num())


class Transformed(nn.Module):
    """LayerNorm and GELU instead of batch-norm and ReLU."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(1, 8, 3, padding=1), nn.LayerNorm(36), nn.Linear(8 * 36, 4)

    def forward(self, x):
        return self.fc(F.gelu(self.norm(self.conv(x).flatten(2))).flatten(1))


def with_statistics(model: nn.Module) -> nn.Module:
    """The model in eval mode, its batch-norms as training leaves them: statistics and weights that matter."""
    generator = torch.Generator().manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.running_mean, module.running_var, module.weight, module.bias):
                tensor.data.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return model.eval()
