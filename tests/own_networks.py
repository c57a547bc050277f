"""Small networks of kinds that the package does not build: what a user brings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Net(nn.Module):
    """A convolution with batch-norm, for digits."""

    def __init__(self, num_classes: int = 10, channels: int = 1):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(F.relu(self.bn(self.conv(x))).mean((2, 3)))


class ViT(nn.Module):
    """Patches, a class token, two blocks of attention, layer-norm, GELU."""

    def __init__(self, num_classes: int = 10, channels: int = 1, size: tuple[int, int] = (8, 8), width: int = 16):
        super().__init__()
        self.patches = nn.Conv2d(channels, width, 2, stride=2)
        tokens = (size[0] // 2) * (size[1] // 2) + 1
        self.token, self.places = nn.Parameter(torch.zeros(1, 1, width)), nn.Parameter(torch.randn(1, tokens, width))
        layer = {"dim_feedforward": 2 * width, "dropout": 0.0, "activation": F.gelu, "batch_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, norm_first=True, **layer) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(h), -1, -1), h], dim=1) + self.places
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h)[:, 0])


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution, layer-norm over the channels, GELU, a scale for each channel."""

    def __init__(self, width: int):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(F.gelu(self.up(h)))).permute(0, 3, 1, 2)


def convnext(channels: int = 1, num_classes: int = 10) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 8, 2, stride=2),
        ConvNeXtBlock(8),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.LayerNorm(8),
        nn.Linear(8, num_classes),
    )


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 with batch-norm, and a projection."""

    def __init__(self, inputs: int, width: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 4 * width, 1, bias=False), nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))

    def forward(self, x: Tensor) -> Tensor:
        h = self.relu(self.bn1(self.conv1(x)))
        h = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(h)))))
        h += self.downsample(x)
        return self.relu(h)


def bottlenecks(num_classes: int = 10) -> nn.Module:
    """The stem of a ResNet-50 (7x7, stride 2, max-pooling) and two of its blocks, narrow."""
    stem = nn.Sequential(nn.Conv2d(3, 8, 7, 2, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
    blocks = nn.Sequential(Bottleneck(8, 4, 1), Bottleneck(16, 8, 2))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, num_classes))
    return nn.Sequential(stem, nn.MaxPool2d(3, 2, 1), blocks, head)


def dropout(num_classes: int = 10) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, num_classes))


class Odd(nn.Module):
    """What a checkpoint must keep besides weights: tied and frozen ones, buffers of integers, booleans, floats."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(64, 16)
        self.tied = nn.Linear(64, 16, bias=False)
        self.tied.weight = self.embed.weight
        self.frozen = nn.Linear(64, 64).requires_grad_(False)
        self.head = nn.Linear(16, 10)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("level", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.calls.add_(1)
            self.seen.fill_(True)
            self.level.lerp_(x.mean().detach().expand(2), 0.1)
        h = self.frozen(x.flatten(1))
        return self.head(torch.relu(self.embed(h) + self.tied(h.roll(1, 1))) + self.level.mean())


class Two(nn.Module):
    """Returns two outputs, in train mode alone if asked."""

    def __init__(self, only_in_training: bool = False):
        super().__init__()
        self.fc, self.only_in_training = nn.Linear(64, 10), only_in_training

    def forward(self, x: Tensor):
        logits = self.fc(x.flatten(1))
        return logits if self.only_in_training and not self.training else (logits, logits)
