"""PreActResNet-18 in the form of the adversarial-training literature (Wong et al., Rice et al., AWP).

11,172,170 parameters and 0.5554 GMAC at 3x32x32 and 10 classes. Two networks share the name and most keys. This one has
a batch-norm and a ReLU behind the last stage (`bn`), and its 1x1 shortcuts read the block's input itself; the classic
CIFAR version has 11,171,146 parameters, no `bn`, and shortcuts that read the activated input. The state_dict's keys
are the published ones (conv1, layer1.0.bn1, ..., bn, linear). The last pooling is global: any size from 8x8 works.

Numbered layers, 18 in total (the 1x1 shortcuts do not count): 1 the stem; 2-17 the two convolutions of each block, the
first as it leaves the convolution, the second as the output of the block; 18 the logits.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F


class PreActBlock(nn.Module):
    """conv2(relu(bn2(conv1(relu(bn1(x)))))) plus x itself, or plus shortcut(x) where the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.shortcut = nn.Sequential()  # the identity, unless the shape changes
        if stride != 1 or inputs != outputs:
            self.shortcut.append(nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        """One residual block."""
        h = self.conv1(F.relu(self.bn1(x)))
        out: Tensor = self.conv2(F.relu(self.bn2(h))) + self.shortcut(x)
        return out


class PreActResNet18(nn.Module):
    """Stages of 64, 128, 256 and 512 channels; each but the first halves the image."""

    layer_names = (
        "conv1",
        *(f"layer{stage}.{block}{part}" for stage in (1, 2, 3, 4) for block in (0, 1) for part in (".conv1", "")),
        "linear",
    )

    def __init__(self, *, num_classes: int, channels: int, normalize: nn.Module) -> None:
        super().__init__()
        self.normalize = normalize
        self.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        self.layer1 = nn.Sequential(PreActBlock(64, 64, 1), PreActBlock(64, 64, 1))
        self.layer2 = nn.Sequential(PreActBlock(64, 128, 2), PreActBlock(128, 128, 1))
        self.layer3 = nn.Sequential(PreActBlock(128, 256, 2), PreActBlock(256, 256, 1))
        self.layer4 = nn.Sequential(PreActBlock(256, 512, 2), PreActBlock(512, 512, 1))
        self.bn = nn.BatchNorm2d(512)
        self.linear = nn.Linear(512, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Pixels in [0, 1] to logits."""
        h = self.conv1(self.normalize(x))
        h = self.layer4(self.layer3(self.layer2(self.layer1(h))))
        logits: Tensor = self.linear(F.relu(self.bn(h)).mean((2, 3)))
        return logits
