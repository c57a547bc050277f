"""ResNet-18 in its CIFAR form: a 3x3 stem without pooling, then four stages of two residual blocks.

11,173,962 parameters and 0.5554 GMAC at 3x32x32 and 10 classes. The keys of the state_dict are those of the
common CIFAR ResNet (conv1, bn1, layer1.0.conv1, ..., linear), so published checkpoints load. The last pooling is
global: at 32x32 it equals the published 4x4 average pooling, and any size from 8x8 works.

Numbered layers, 18 in total (the 1x1 shortcuts do not count): 1 the stem; 2-17 the two convolutions of each block, the
first taken after its batch-norm and ReLU, the second as the output of the block (after the addition and ReLU); 18 the
logits.
"""

from __future__ import annotations

from torch import Tensor, nn


class BasicBlock(nn.Module):
    """relu(bn2(conv2(relu(bn1(conv1(x))))) + shortcut(x))."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu2 = nn.ReLU()
        self.shortcut = nn.Sequential()  # the identity, unless the shape changes
        if stride != 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """One residual block."""
        h = self.relu1(self.bn1(self.conv1(x)))
        out: Tensor = self.relu2(self.bn2(self.conv2(h)) + self.shortcut(x))
        return out


class ResNet18(nn.Module):
    """Stages of 64, 128, 256 and 512 channels; each but the first halves the image."""

    layer_names = (
        "relu",
        *(f"layer{stage}.{block}{part}" for stage in (1, 2, 3, 4) for block in (0, 1) for part in (".relu1", "")),
        "linear",
    )

    def __init__(self, *, num_classes: int, channels: int, normalize: nn.Module) -> None:
        super().__init__()
        self.normalize = normalize
        self.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        self.linear = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Pixels in [0, 1] to logits."""
        h = self.relu(self.bn1(self.conv1(self.normalize(x))))
        h = self.layer4(self.layer3(self.layer2(self.layer1(h))))
        logits: Tensor = self.linear(h.mean((2, 3)))
        return logits
