"""Networks with the key names of other repositories, without code of the package."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class PeerBlock(nn.Module):
    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.conv1 = nn.BatchNorm2d(i), nn.Conv2d(i, o, 3, stride, 1, bias=False)
        self.bn2, self.conv2 = nn.BatchNorm2d(o), nn.Conv2d(o, o, 3, 1, 1, bias=False)
        self.same = i == o
        self.convShortcut = None if self.same else nn.Conv2d(i, o, 1, stride, 0, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(x))
        skip = x if self.convShortcut is None else self.convShortcut(out)
        return skip + self.conv2(F.relu(self.bn2(self.conv1(out))))


class PeerStage(nn.Module):
    def __init__(self, n: int, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.layer = nn.Sequential(*[PeerBlock(i if k == 0 else o, o, stride if k == 0 else 1) for k in range(n)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class PeerWRN(nn.Module):
    def __init__(self, depth: int, width: int, num_classes: int = 10, *, sub_block1: bool = False) -> None:
        super().__init__()
        n, c = (depth - 4) // 6, [16, 16 * width, 32 * width, 64 * width]
        self.conv1 = nn.Conv2d(3, c[0], 3, 1, 1, bias=False)
        self.block1 = PeerStage(n, c[0], c[1], 1)
        if sub_block1:
            self.sub_block1 = PeerStage(n, c[0], c[1], 1)
        self.block2, self.block3 = PeerStage(n, c[1], c[2], 2), PeerStage(n, c[2], c[3], 2)
        self.bn1, self.fc = nn.BatchNorm2d(c[3]), nn.Linear(c[3], num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.block3(self.block2(self.block1(self.conv1(x))))))
        return self.fc(F.avg_pool2d(out, 8).flatten(1))


class PeerBasic(nn.Module):
    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(i, o, 3, stride, 1, bias=False), nn.BatchNorm2d(o)
        self.conv2, self.bn2 = nn.Conv2d(o, o, 3, 1, 1, bias=False), nn.BatchNorm2d(o)
        self.shortcut = nn.Sequential()
        if stride != 1 or i != o:
            self.shortcut = nn.Sequential(nn.Conv2d(i, o, 1, stride, bias=False), nn.BatchNorm2d(o))

    def forward(self, x: Tensor) -> Tensor:
        out = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


class PeerResNet18(nn.Module):
    def __init__(self, num_classes: int = 10) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64)
        self.layer1 = nn.Sequential(PeerBasic(64, 64, 1), PeerBasic(64, 64, 1))
        self.layer2 = nn.Sequential(PeerBasic(64, 128, 2), PeerBasic(128, 128, 1))
        self.layer3 = nn.Sequential(PeerBasic(128, 256, 2), PeerBasic(256, 256, 1))
        self.layer4 = nn.Sequential(PeerBasic(256, 512, 2), PeerBasic(512, 512, 1))
        self.linear = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer4(self.layer3(self.layer2(self.layer1(F.relu(self.bn1(self.conv1(x)))))))
        return self.linear(F.avg_pool2d(out, 4).flatten(1))
